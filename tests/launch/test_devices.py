"""The machine's devices, from the tools' printed output."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ascendfactory.catalog.read import find_device as in_catalogue
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Device
from ascendfactory.core.recipe import ClusterSpec
from ascendfactory.launch.devices import Accelerators, catalogue_names, check_present, detect, read_cpu, resolve_cluster
from tests.examples import CPU, device

ROWS = {"cpu": CPU, "a100-80g": device("a100-80g", "cuda"), "snt9b": device("snt9b", "npu"), "snt9b23": device("snt9b23", "npu", 16)}

CPUINFO = """\
processor : 0
cpu MHz : 2000.000
physical id : 0
core id : 0
flags : fma avx2 {flags}

processor : 1
cpu MHz : 2500.000
physical id : 0
core id : 0
flags : fma avx2 {flags}
"""

NPU_910B = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3304 / 65536         |
| 1     910B3               | OK            | 90.1        38                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3304 / 65536         |
"""
NPU_910C = """\
| 0     Ascend910           | OK            | 171.2       37                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3117 / 65536         |
| 0     Ascend910           | OK            | -           37                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2898 / 65536         |
"""


def find_device(name: str) -> Device:
    if name not in ROWS:
        raise UserError("cluster.device", f"no device {name}", "")
    return ROWS[name]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with only the tools that a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(folder: Path, name: str, output: str) -> None:
    (folder / f"{name}.txt").write_text(output)
    tool = folder / name
    tool.write_text(f'#!/bin/sh\nwhile IFS= read -r line; do echo "$line"; done < {folder / name}.txt\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_a_machine_without_accelerators_is_a_cpu(tools: Path) -> None:
    cluster = resolve_cluster(ClusterSpec(), find_device)
    assert (cluster.device.kind, cluster.nodes, cluster.nproc) == ("cpu", 1, 1)
    assert cluster.device.memory_bytes != CPU.memory_bytes  # what is free here


def test_processes_share_the_memory_and_the_peak_of_a_cpu(tools: Path) -> None:
    one, two = (resolve_cluster(ClusterSpec(device="cpu", nproc=n), find_device).device for n in (1, 2))
    assert two.peak_fp32_flops == one.peak_fp32_flops / 2
    assert two.memory_bytes == pytest.approx(one.memory_bytes / 2, rel=0.2)


def test_nvidia_devices_are_found_and_counted(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tools, "nvidia-smi", "NVIDIA A100-SXM4-80GB, 81920\nNVIDIA A100-SXM4-80GB, 81920\n")
    cluster = resolve_cluster(ClusterSpec(), find_device)
    assert (cluster.device.name, cluster.nproc) == ("a100-80g", 2)
    check_present(cluster)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert resolve_cluster(ClusterSpec(), find_device).nproc == 1
    with pytest.raises(UserError, match=r"wants 2 x a100-80g and this machine has 1 cuda"):
        check_present(cluster)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect() is None


@pytest.mark.parametrize(("table", "name"), [(NPU_910B, "snt9b"), (NPU_910C, "snt9b23")])
def test_ascend_dies_are_counted(tools: Path, table: str, name: str) -> None:
    put(tools, "npu-smi", table)
    cluster = resolve_cluster(ClusterSpec(), find_device)
    assert (cluster.device.name, cluster.nproc) == (name, 2)


def test_an_unknown_product_is_told(tools: Path) -> None:
    put(tools, "nvidia-smi", "NVIDIA Q9000, 81920\n")
    with pytest.raises(UserError, match="this machine has NVIDIA Q9000"):
        resolve_cluster(ClusterSpec(), find_device)


def test_planning_for_devices_that_are_elsewhere_takes_whole_nodes(tools: Path) -> None:
    cluster = resolve_cluster(ClusterSpec(device="snt9b23", nodes=2), find_device)
    assert cluster.num_devices == 32
    with pytest.raises(UserError, match="this machine has cpu"):
        check_present(cluster)


@pytest.mark.parametrize(
    ("product", "mebibytes", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40g"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("Tesla V100-SXM2-32GB", 32768, "v100-32g"),
    ],
)
def test_product_names_become_names_of_the_catalogue(product: str, mebibytes: int, name: str) -> None:
    assert name in catalogue_names(Accelerators("cuda", product, 1, mebibytes * 2**20))


def test_the_names_are_really_in_the_catalogue() -> None:
    for product, mebibytes in (("NVIDIA A100-SXM4-80GB", 81920), ("NVIDIA H100 80GB HBM3", 81559), ("NVIDIA H200", 143771)):
        names = catalogue_names(Accelerators("cuda", product, 1, mebibytes * 2**20))
        found = []
        for name in names:
            try:
                found.append(in_catalogue(name))
            except UserError:
                continue
        assert found, names
    for name in ("snt9b", "snt9b23", "cpu"):
        in_catalogue(name)


@pytest.mark.parametrize(
    ("flags", "flops", "bf16", "has_bf16"),
    [
        ("", 2.5e9 * 32, 2.5e9 * 32 / 50, False),  # 8 floats x 2 operations x 2 units
        ("avx512f", 2.5e9 * 64, 2.5e9 * 64 / 50, False),
        ("avx512f avx512_bf16", 2.5e9 * 64, 2.5e9 * 128, True),
        ("avx512f amx_bf16", 2.5e9 * 64, 2.5e9 * 2048, True),
    ],
)
def test_the_peak_of_a_cpu_follows_its_formula(flags: str, flops: float, bf16: float, has_bf16: bool) -> None:
    cpu = read_cpu(CPUINFO.replace("{flags}", flags))
    assert (cpu.num_cores, cpu.clock_hz) == (1, 2.5e9)  # two threads of one core
    assert (cpu.fp32_flops, cpu.bf16_flops, cpu.has_bf16) == (flops, bf16, has_bf16)

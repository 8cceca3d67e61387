"""Which devices this machine has, found without torch: /proc/cpuinfo, nvidia-smi, npu-smi."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Cluster, Device
from ascendfactory.core.recipe import ClusterSpec

_ASK_TIMEOUT_S = 20.0
_DEFAULT_CPU_HZ = 2.5e9  # Arm's /proc/cpuinfo does not tell the clock


@dataclass(frozen=True)
class Accelerators:
    """What a vendor's tool reports: a product name as printed, devices usable by us, memory of one."""

    kind: Literal["cuda", "npu"]
    product: str
    num_devices: int
    memory_bytes: int


@dataclass(frozen=True)
class Cpu:
    """The processor as the kernel describes it."""

    num_cores: int  # physical cores that this process may use: two threads of a core share its units
    clock_hz: float
    flags: frozenset[str]

    @property
    def fp32_flops(self) -> float:
        """Peak FLOP/s: cores * clock * (vector bits / 32) * 2 operations of a fused multiply-add * 2 such units."""
        bits = 512 if "avx512f" in self.flags else 256 if "avx2" in self.flags else 128
        units = 2 if self.flags & {"fma", "avx512f", "asimd"} else 1
        return self.num_cores * self.clock_hz * bits / 32 * 2 * units

    @property
    def has_bf16(self) -> bool:
        """Whether there are bfloat16 matrix units that the usual kernels use."""
        return bool(self.flags & {"avx512_bf16", "amx_bf16"})

    @property
    def bf16_flops(self) -> float:
        """Peak FLOP/s: AMX does 1024 multiply-adds a cycle, AVX512-BF16 twice fp32; without units about 1/50 of fp32 (measured)."""
        if "amx_bf16" in self.flags:
            return self.num_cores * self.clock_hz * 2048
        return self.fp32_flops * 2 if self.has_bf16 else self.fp32_flops / 50


def resolve_cluster(spec: ClusterSpec, find_device: Callable[[str], Device]) -> Cluster:
    """The real devices that a recipe's `cluster` means on this machine.

    Args:
        spec: from the recipe; `auto` is decided here.
        find_device: the catalogue's look-up, name → Device.

    Raises:
        UserError: for a device that the catalogue does not know.
    """
    if spec.device != "auto":
        device = find_device(spec.device)
        found = detect() if device.kind != "cpu" and spec.nproc == "auto" else None
    elif found := detect():
        device = _of_catalogue(found, find_device)
    else:
        device = find_device("cpu")
    if device.kind == "cpu":
        nproc = 1 if spec.nproc == "auto" else spec.nproc
        return Cluster(device=_this_cpu(device, nproc), nodes=spec.nodes, nproc=nproc)
    if spec.nproc != "auto":
        return Cluster(device=device, nodes=spec.nodes, nproc=spec.nproc)
    nproc = found.num_devices if found and found.kind == device.kind else device.devices_per_node
    return Cluster(device=device, nodes=spec.nodes, nproc=nproc)


def check_present(cluster: Cluster) -> None:
    """Makes sure that this machine has the devices of the plan.

    Raises:
        UserError: naming what is here and how to use it.
    """
    device = cluster.device
    if device.kind == "cpu":
        return
    found = detect()
    num_here = found.num_devices if found and found.kind == device.kind else 0
    if num_here < cluster.nproc:
        here = f"{num_here} {device.kind}" if num_here else "cpu"
        raise UserError(
            "cluster",
            f"the plan wants {cluster.nproc} x {device.name} and this machine has {here}; write 'cluster: auto', or run it there",
            f"计划需要 {cluster.nproc} 个 {device.name}，本机只有 {here}；请写 'cluster: auto'，或在有设备的机器上运行",
        )


def detect() -> Accelerators | None:
    """The accelerators of this machine that the environment lets us use, or None."""
    return _nvidia() or _ascend()


def read_cpu(cpuinfo: str | None = None) -> Cpu:
    """The processor of this machine.

    Args:
        cpuinfo: text in the form of /proc/cpuinfo; read from there when None.
    """
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(errors="replace") if path.exists() else ""
    cores: set[tuple[str, str]] = set()
    clocks: list[float] = []
    flags: set[str] = set()
    physical = "0"
    for line in cpuinfo.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "physical id":
            physical = value
        elif key == "core id":
            cores.add((physical, value))
        elif key == "cpu MHz":
            clocks.append(float(value) * 1e6)
        elif key in ("flags", "Features"):
            flags |= set(value.split())
    usable = usable_cpus()
    return Cpu(min(len(cores) or usable, usable), max(clocks, default=_DEFAULT_CPU_HZ), frozenset(flags))


def usable_cpus() -> int:
    """Logical processors that this process may use: the affinity mask and the container's quota, at least 1."""
    num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        num = min(num, max(1, int(quota[0]) // int(quota[1])))
    return max(1, num)


def available_ram_bytes() -> int:
    """Memory that new processes can have: what is free here, or what the container's limit leaves."""
    free = int(psutil.virtual_memory().available)
    limit, used = _read_words("/sys/fs/cgroup/memory.max"), _read_words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, max(0, int(limit[0]) - int(used[0])))
    return free


def _read_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _this_cpu(row: Device, nproc: int) -> Device:
    """The catalogue's cpu row with what one of `nproc` processes on this machine gets."""
    cpu = read_cpu()
    return row.model_copy(
        update={
            "memory_bytes": available_ram_bytes() // nproc,
            "peak_fp32_flops": cpu.fp32_flops / nproc,
            "peak_bf16_flops": cpu.bf16_flops / nproc,
            "memory_bandwidth_bytes_s": row.memory_bandwidth_bytes_s / nproc,
            "devices_per_node": nproc,
            "has_bf16": cpu.has_bf16,
        }
    )


def _of_catalogue(found: Accelerators, find_device: Callable[[str], Device]) -> Device:
    for name in catalogue_names(found):
        try:
            return find_device(name)
        except UserError:  # not in the catalogue under this name
            continue
    raise UserError(
        "cluster.device",
        f"this machine has {found.product}, which the catalogue does not know; write the nearest device, such as 'cluster: 8 a100-80g'",
        f"本机的 {found.product} 不在目录中；请写最接近的设备，如 'cluster: 8 a100-80g'",
    )


def catalogue_names(found: Accelerators) -> list[str]:
    """Names under which the catalogue may know a product, the likeliest first (`NVIDIA A100-SXM4-80GB` → a100-80g, a100)."""
    product = found.product.lower()
    if found.kind == "npu":
        return ["snt9b"] if "910b" in product else ["snt9b23"] if "910" in product else []
    words = [w for w in re.split(r"[\s-]+", product) if w not in ("nvidia", "tesla", "geforce")]
    if words[:1] == ["rtx"] and len(words) > 1:
        words[0] = "rtx" + words[1]
    chip = words[0] if words else product
    gib = round(found.memory_bytes / 2**30)
    return [*(f"{chip}-{size}g" for size in (gib, gib + 1)), chip]


def _visible(variables: tuple[str, ...], num_devices: int) -> int:
    """How many devices the vendor's visibility variable leaves."""
    for name in variables:
        if (value := os.environ.get(name)) is not None:
            return min(num_devices, len([part for part in value.split(",") if part.strip() not in ("", "-1")]))
    return num_devices


def _ask(argv: list[str]) -> str:
    """What a vendor's tool prints, or "" where there is none or it fails."""
    if not shutil.which(argv[0]):
        return ""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _nvidia() -> Accelerators | None:
    rows = _ask(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]).strip().splitlines()
    devices = [row.rsplit(",", 1) for row in rows if "," in row]
    num = _visible(("CUDA_VISIBLE_DEVICES",), len(devices))
    if not num:
        return None
    product, mebibytes = devices[0]
    return Accelerators("cuda", product.strip(), num, int(float(mebibytes)) * 2**20 if mebibytes.strip().isdigit() else 0)


def _ascend() -> Accelerators | None:
    """`npu-smi info` prints, for each card, a row with its name and one row with a bus id for each of its dies."""
    table = _ask(["npu-smi", "info"])
    names = re.findall(r"^\|\s*\d+\s+((?:Ascend\s?)?[0-9]{3}\w*)\s*\|", table, flags=re.MULTILINE)
    buses = re.findall(r"^\|\s*\d+(?:\s+\d+)?\s*\|\s*[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:", table, flags=re.MULTILINE)
    num = _visible(("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES"), len(buses))
    return Accelerators("npu", names[0], num, 0) if names and num else None

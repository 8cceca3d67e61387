"""`ascendfactory doctor`: what this machine has, what is missing, and how to mend it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from ascendfactory.core.messages import pick
from ascendfactory.launch.check import Finding, check_backend
from ascendfactory.launch.devices import available_ram_bytes, detect, read_cpu

_GIB = 2**30
_MIN_RAM_BYTES = 2 * _GIB
_MIN_DISK_BYTES = 10 * _GIB
_MIN_SHM_BYTES = _GIB  # data workers and collectives between processes hand tensors over here
# Where the package is run from its source tree, nothing tells which versions it was tested with: these are they.
_ENGINE_PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "pyarrow")


def doctor(
    deep: Annotated[bool, typer.Option("--deep", help=pick("import torch and compute on the device", "导入 torch 并在设备上计算"))] = False,
    backend: Annotated[str | None, typer.Option("--backend", help=pick("check what a back end needs", "检查某个后端的需求"))] = None,
    profile: Annotated[str, typer.Option("--profile", help=pick("its version", "其版本"))] = "auto",
) -> int:
    """Check this machine."""
    if backend:
        from ascendfactory.launch.environments import find_profile

        found = list(check_backend(find_profile(backend.replace("-", "_"), profile)))
        _print(found)
        return 1 if any(row.state == "fail" for row in found) else 0
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _packages, _devices, _memory, _disk, _shared_memory, _ports, _hub_cache]
    rows = [row for check in checks for row in check()]
    if deep:
        rows += list(_torch())
    _print(rows)
    return 1 if any(row.state == "fail" for row in rows) else 0


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield Finding(
        "python", "ok" if good else "fail", platform.python_version(), "" if good else pick("install Python 3.11", "请安装 Python 3.11")
    )


def _packages() -> Iterator[Finding]:
    wanted = _requirements()
    for name in _ENGINE_PACKAGES:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "fail", pick("not installed", "未安装"), f"pip install '{name}{wanted.get(name, '')}'")
            continue
        if allowed(found, wanted.get(name, "")):
            yield Finding(name, "ok", found)
        else:
            yield Finding(
                name, "fail", f"{found}, {pick('tested with', '经测试的版本为')} {wanted[name]}", f"pip install '{name}{wanted[name]}'"
            )


def _requirements() -> dict[str, str]:
    """Package → versions that AscendFactory's own metadata asks for."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("ascendfactory") or []
    except metadata.PackageNotFoundError:
        return {}
    return {parsed.name.lower(): str(parsed.specifier) for parsed in map(Requirement, lines)}


def allowed(version: str, specifier: str) -> bool:
    """Whether a version meets a specifier such as `>=2.13,<2.14`; a local suffix (`+cpu`) does not count."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version.split("+")[0], prereleases=True)


def _devices() -> Iterator[Finding]:
    cpu = read_cpu()
    units = pick("bf16 units", "有 bf16 单元") if cpu.has_bf16 else pick("no bf16 units: fp32 is used", "无 bf16 单元：使用 fp32")
    yield Finding("cpu", "ok", f"{cpu.num_cores} x {cpu.clock_hz / 1e9:.1f} GHz, {cpu.fp32_flops / 1e9:.0f} GFLOP/s fp32, {units}")
    if found := detect():
        memory = f" {found.memory_bytes / _GIB:.0f} GiB" if found.memory_bytes else ""
        yield Finding(found.kind, "ok", f"{found.num_devices} x {found.product}{memory}")
    else:
        yield Finding(pick("accelerator", "加速卡"), "ok", pick("none: training runs on the CPU", "无：在 CPU 上训练"))


def _memory() -> Iterator[Finding]:
    free = available_ram_bytes()
    fix = "" if free >= _MIN_RAM_BYTES else pick("close other programs, or take a smaller model", "请关闭其他程序，或换更小的模型")
    yield Finding(pick("free RAM", "可用内存"), "fail" if fix else "ok", f"{free / _GIB:.1f} GiB", fix)


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free
    fix = (
        "" if free >= _MIN_DISK_BYTES else pick("free space, or set output.dir on another disk", "请清理磁盘，或将 output.dir 设到其他磁盘")
    )
    yield Finding(pick("free disk here", "当前磁盘余量"), "warn" if fix else "ok", f"{free / _GIB:.1f} GiB", fix)
    if not os.access(".", os.W_OK):
        yield Finding(
            pick("this folder", "当前文件夹"),
            "fail",
            pick("not writable", "不可写"),
            pick("change to a folder of yours", "请切换到可写的文件夹"),
        )


def _shared_memory() -> Iterator[Finding]:
    if not Path("/dev/shm").is_dir():
        return
    size = shutil.disk_usage("/dev/shm").total
    fix = "" if size >= _MIN_SHM_BYTES else pick("in a container: docker run --shm-size=16g", "容器请加 --shm-size=16g")
    yield Finding("/dev/shm", "warn" if fix else "ok", f"{size / _GIB:.1f} GiB", fix)


def _ports() -> Iterator[Finding]:
    """Processes of a run meet on a free local port."""
    name = pick("local port", "本地端口")
    try:
        with socket.socket() as server:
            server.bind(("localhost", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=5):
                yield Finding(name, "ok", pick("localhost accepts connections", "localhost 可连接"))
    except OSError as error:
        fix = pick(
            "let /etc/hosts name 127.0.0.1 localhost, and check the firewall", "请在 /etc/hosts 中设 127.0.0.1 localhost，并检查防火墙"
        )
        yield Finding(name, "fail", str(error), fix)


def _hub_cache() -> Iterator[Finding]:
    named = os.environ.get("HF_HOME")
    home = Path(named or "~/.cache/huggingface").expanduser()
    existing = next(path for path in (home, *home.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    fix = "" if writable else pick("export HF_HOME=<a folder you can write>", "export HF_HOME=<可写的文件夹>")
    offline = ", HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    yield Finding(pick("Hugging Face cache", "Hugging Face 缓存"), "ok" if writable else "warn", f"{home}{offline}", fix)


def _torch() -> Iterator[Finding]:
    """Imports torch in a process of its own, so that a broken installation cannot take the doctor with it."""
    import subprocess

    code = (
        "import importlib.util as u, torch\n"
        "if u.find_spec('torch_npu'): import torch_npu\n"
        "d = 'cuda' if torch.cuda.is_available() else 'npu' if getattr(torch, 'npu', None) and torch.npu.is_available() else 'cpu'\n"
        "x = torch.ones(64, 64, device=d); assert float((x @ x).sum()) == 64.0 ** 3; print(torch.__version__, 'on', d)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        yield Finding("torch --deep", "ok", done.stdout.strip())
    else:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield Finding("torch --deep", "fail", last, pick("install torch anew for this device", "请为此设备重新安装 torch"))


def _print(rows: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", pick("checked", "检查项"), pick("found", "结果"), pick("how to mend it", "修复方法")):
        table.add_column(title, overflow="fold")
    for row in rows:
        mark, colour = marks[row.state]
        table.add_row(Text(mark, style=colour), row.name, Text(row.found), Text(row.fix))
    Console(highlight=False).print(table)

"""What a back end needs on this machine, checked before it is started: environment, devices, driver, ports, memory, disk, network."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ascendfactory.core.messages import pick
from ascendfactory.launch.devices import detect
from ascendfactory.launch.environments import MARK, Profile, environment_dir

State = Literal["ok", "warn", "fail"]
_GIB = 2**30
_MIN_SHM_BYTES = 16 * _GIB  # collectives of eight devices and data workers hand tensors over there
_MIN_DISK_BYTES = 50 * _GIB
_PORTS = {"torchrun": 29500, "Megatron": 6000, "Ray": 6379}
_USES_RAY = ("verl", "mindspeed_rl")


@dataclass(frozen=True)
class Finding:
    """One thing checked; a `fail` keeps the back end from running."""

    name: str
    state: State
    found: str
    fix: str = ""


def check_backend(profile: Profile) -> Iterator[Finding]:
    """Every check of a profile, in the order in which to mend them."""
    yield from _environment(profile)
    yield from _devices(profile)
    found = detect()
    if profile.devices == ["npu"] or (found is not None and found.kind == "npu"):
        yield from _ascend()
    yield from _network()
    yield from _ports(profile)
    yield from _room()


def _environment(profile: Profile) -> Iterator[Finding]:
    folder = environment_dir(profile.environment)
    install = f"ascendfactory install {profile.backend} --profile {profile.name}"
    if not (folder / MARK).exists():
        yield Finding(profile.title, "fail", pick("not installed", "未安装"), install)
        return
    broken = _versions(folder, profile)
    yield Finding(profile.title, "fail" if broken else "ok", broken or str(folder), f"rm -r {folder}; {install}" if broken else "")
    for checkout in profile.sources:
        there = (folder / "src" / checkout.folder).is_dir()
        yield Finding(checkout.folder, "ok" if there else "fail", checkout.ref, "" if there else install)


def _versions(folder: Path, profile: Profile) -> str:
    """What differs from the pins, as `package found (pinned)`, or ""."""
    pins = dict(pin.split("==") for pin in (*profile.packages, *profile.bare_packages) if "==" in pin)
    code = "import importlib.metadata as m, sys\nfor n in sys.argv[1:]:\n try: print(n, m.version(n))\n except Exception: print(n, '-')"
    try:
        done = subprocess.run([folder / "bin/python", "-c", code, *pins], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return str(error.strerror)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    wrong = [f"{name} {found.get(name, '-')} ({pin})" for name, pin in pins.items() if found.get(name, "-").split("+")[0] != pin]
    return ", ".join(wrong)


def _devices(profile: Profile) -> Iterator[Finding]:
    found = detect()
    kind = found.kind if found else "cpu"
    words = f"{found.num_devices} x {found.product}" if found else pick("none: CPU only", "无：仅 CPU")
    good = kind in profile.devices
    fix = "" if good else pick(f"this back end runs on {', '.join(profile.devices)}", f"该后端运行于 {'、'.join(profile.devices)}")
    yield Finding(pick("devices", "设备"), "ok" if good else "fail", words, fix)


def _ascend() -> Iterator[Finding]:
    """Driver and toolkit of Ascend devices, as their own set_env.sh leaves them."""
    driver = Path("/usr/local/Ascend/driver/version.info")
    has_driver = driver.exists()
    version = next((line.split("=")[1] for line in _lines(driver) if line.lower().startswith("version=")), "-") if has_driver else "-"
    yield Finding(
        pick("Ascend driver", "昇腾驱动"),
        "ok" if has_driver else "fail",
        version,
        "" if has_driver else pick("install the driver", "请安装驱动"),
    )
    for variable, name, script in (
        ("ASCEND_HOME_PATH", "CANN", "source /usr/local/Ascend/ascend-toolkit/set_env.sh"),
        ("ATB_HOME_PATH", "nnal/atb", "source /usr/local/Ascend/nnal/atb/set_env.sh"),
    ):
        value = os.environ.get(variable, "")
        yield Finding(
            name, "ok" if value else "fail", value or pick(f"{variable} is not set", f"未设置 {variable}"), "" if value else script
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _network() -> Iterator[Finding]:
    """Names of network interfaces in the variables that collectives read."""
    there = {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if not (value := os.environ.get(variable)):
            continue
        wrong = [name for name in value.lstrip("^=").split(",") if name and not any(known.startswith(name) for known in there)]
        fix = pick(f"write one of {', '.join(sorted(there))}", f"可写 {'、'.join(sorted(there))}") if wrong else ""
        yield Finding(variable, "fail" if wrong else "ok", value, fix)


def _ports(profile: Profile) -> Iterator[Finding]:
    for name, port in _PORTS.items():
        if (name == "Ray") != (profile.backend in _USES_RAY) and name != "torchrun":
            continue
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind(("", port))
            except OSError:
                fix = pick("end what holds it, or export MASTER_PORT=<another>", "请结束占用者，或 export MASTER_PORT=<其他端口>")
                yield Finding(f"{pick('port', '端口')} {port} ({name})", "fail", pick("in use", "已被占用"), fix)
                continue
        yield Finding(f"{pick('port', '端口')} {port} ({name})", "ok", pick("free", "空闲"))


def _room() -> Iterator[Finding]:
    if Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        small = size < _MIN_SHM_BYTES
        yield Finding("/dev/shm", "warn" if small else "ok", f"{size / _GIB:.0f} GiB", "docker run --shm-size=64g" if small else "")
    free = shutil.disk_usage(".").free
    small = free < _MIN_DISK_BYTES
    fix = pick("converted weights and checkpoints take several times the model", "转换后的权重与检查点为模型大小的数倍") if small else ""
    yield Finding(pick("free disk here", "当前磁盘余量"), "warn" if small else "ok", f"{free / _GIB:.0f} GiB", fix)

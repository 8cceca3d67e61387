"""What the nodes of a job must have in common, compared before anything is started: versions, devices, model, data, run folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from ascendfactory import __version__
from ascendfactory.backends.common import MEETING, program
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, Plan
from ascendfactory.launch.devices import detect
from ascendfactory.launch.environments import environment_dir
from ascendfactory.launch.place import Place
from ascendfactory.launch.team import Team, port_in_use

Facts = dict[str, Any]
_SEEN_S = 15.0  # a file written on one node may take so long to show on another (NFS keeps directories in a cache)
_MIN_DISK_BYTES = 2**30
# What a fact is called, and what to do where it differs from node 0's.
_WORDS = {
    "version": ("AscendFactory", "install the same version on every node", "请在各节点安装相同版本"),
    "python": ("Python", "use the same Python on every node", "请在各节点使用相同的 Python"),
    "packages": ("packages", "make the same environment on every node", "请在各节点建立相同的环境"),
    "devices": ("devices", "take nodes with the same devices", "请选用设备相同的节点"),
    "model": (
        "model.path",
        "keep the same folder on every node, or on a shared disk",
        "请在各节点保存同一文件夹，或放在共享磁盘上",
    ),
    "data": ("data", "keep the same files on every node, or on a shared disk", "请在各节点保存同一文件，或放在共享磁盘上"),
}


def check_nodes(plan: Plan, team: Team, environment: str, own: Callable[[], None]) -> None:
    """Makes sure that all nodes can run the plan together; on every node alike.

    Args:
        environment: the name of the back end's, or "".
        own: what each node checks of itself; it raises UserError.

    Raises:
        UserError: with a line for each thing that differs from node 0, naming the node.
    """
    folder = Path(plan.run_dir)
    mark, is_new = folder / f".seen-{uuid.uuid4().hex[:8]}", not folder.exists()
    if team.is_first:
        _check_port(team.place)
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        shared = team.gather(mark.name)[0]
        mine = {"problem": _problem(own), "shared": _is_there(folder / shared)}
        all_facts = team.gather(_facts(plan, environment) | mine)
    finally:
        mark.unlink(missing_ok=True)
        if team.is_first and is_new:
            folder.rmdir()  # whatever comes of this, nothing half-made is left
    if problems := differences(all_facts, plan.run_dir):
        raise UserError("", "\n".join(en for en, _ in problems), "\n".join(zh for _, zh in problems))


def differences(all_facts: list[Facts], run_dir: str) -> list[tuple[str, str]]:
    """What keeps nodes from running together, a line each, in English and Chinese.

    Args:
        all_facts: of each node, in the order of ranks.
    """
    first, found = all_facts[0], []
    for rank, facts in enumerate(all_facts):
        en, zh = f"node {rank} ({facts['host']})", f"节点 {rank}（{facts['host']}）"
        if problem := facts["problem"]:
            found.append((f"{en}: {problem[0]}", f"{zh}：{problem[1]}"))
        for name, (title, fix, fix_zh) in _WORDS.items():
            if facts[name] != first[name]:
                there, here = _part_that_differs(facts[name], first[name])
                found.append((f"{en}: {title} {there}, node 0 has {here}; {fix}", f"{zh}：{title} 为 {there}，节点 0 为 {here}；{fix_zh}"))
        if not facts["shared"]:
            found.append(
                (
                    f"{en}: output.dir {run_dir} is not node 0's folder; put it on a disk that all nodes share",
                    f"{zh}：output.dir {run_dir} 与节点 0 不是同一文件夹；请放在所有节点共享的磁盘上",
                )
            )
        if facts["free_bytes"] < _MIN_DISK_BYTES:
            free = f"{facts['free_bytes'] / 2**30:.2f} GiB"
            found.append((f"{en}: {free} free at {run_dir}; free some space", f"{zh}：{run_dir} 处剩余 {free}；请清理磁盘"))
    return found


def meeting_job(plan: Plan, environment: str) -> Job:
    """A job for all nodes that adds up one number per process over the devices, and so tries the network between them."""
    cluster, run = plan.cluster, plan.run_dir
    python = "python" if environment else sys.executable
    argv = [python, "-m", "torch.distributed.run", *MEETING, "--nproc-per-node", str(cluster.nproc), f"{run}/job/all_reduce.py"]
    return Job(
        files={"job/all_reduce.py": program("all_reduce.py")},
        argv=[*argv, cluster.device.kind],
        environment=environment,
        nproc=cluster.nproc,
    )


def _facts(plan: Plan, environment: str) -> Facts:
    found = detect() if plan.cluster.device.kind != "cpu" else None
    return {
        "host": socket.gethostname(),
        "version": __version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "packages": _packages(environment),
        "devices": f"{found.num_devices} x {found.product}" if found else "cpu",
        "model": _digest([plan.recipe.model.path]),
        "data": _digest([source.path for source in (*plan.recipe.data.train, *plan.recipe.data.eval)]),
        "free_bytes": shutil.disk_usage(_existing(Path(plan.run_dir))).free,
    }


def _problem(own: Callable[[], None]) -> list[str] | None:
    """What a node finds wrong with itself, in English and Chinese."""
    try:
        own()
    except UserError as error:
        where = f"{error.where}: " if error.where else ""
        return [f"{where}{error.en}", f"{where}{error.zh}"]
    return None


def _packages(environment: str) -> dict[str, str]:
    """Versions on which results depend: of the back end's own environment, or of the one that runs this."""
    if environment:
        sites = list(environment_dir(environment).glob("lib/python*/site-packages"))
        found = metadata.distributions(path=[str(site) for site in sites])
    else:
        found = metadata.distributions()
    names = ("torch", "torch-npu", "transformers", "numpy", "peft", "safetensors", "ray", "vllm")
    return {dist.name.lower(): dist.version for dist in found if dist.name and dist.name.lower().replace("_", "-") in names}


def _digest(paths: list[str]) -> str:
    """Names and sizes of all files, as one short word; `missing` where a path is not there."""
    digest = hashlib.blake2b(digest_size=4)
    for name in paths:
        root = Path(name).expanduser()
        if not root.exists():
            return f"{name} missing"
        files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        for path in files:
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()


def _is_there(path: Path) -> bool:
    deadline_s = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline_s:
        if path.parent.is_dir() and path.name in {found.name for found in path.parent.iterdir()}:
            return True
        time.sleep(0.2)
    return False


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _part_that_differs(there: Any, here: Any) -> tuple[str, str]:
    if not isinstance(there, dict):
        return str(there), str(here)
    names = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    return tuple(json.dumps({name: side.get(name) for name in names}) for side in (there, here))  # type: ignore[return-value]


def _check_port(place: Place) -> None:
    """Whether the engine's processes will be able to meet at node 0."""
    try:
        socket.create_server(("", place.master_port)).close()
    except OSError as error:
        raise port_in_use(place.master_port, error) from None

"""Where a node stands in a job of several: its rank, how many there are, where node 0 is.

Whoever starts the nodes says so in environment variables: the user or our ssh launcher (NNODES, NODE_RANK, MASTER_ADDR), Slurm,
Kubeflow Trainer (PET_*: https://www.kubeflow.org/docs/components/trainer), Volcano's svc plugin (VC_*:
https://volcano.sh/en/docs/tutorial/how_to_use_job_policies), which ModelArts follows.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from ascendfactory.core.messages import UserError

DEFAULT_PORT = 29500
# Which network interface the collectives of gloo, NCCL, HCCL and Megatron's own store take.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Place:
    """One node of a job."""

    rank: int = 0
    nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT

    @property
    def meeting_port(self) -> int:
        """Where node 0's launcher listens; `master_port` is left to the engine's own processes."""
        return self.master_port + 1

    def facts(self) -> dict[str, str]:
        """What stands in braces in a job's argv."""
        return {
            "nodes": str(self.nodes),
            "node_rank": str(self.rank),
            "master_addr": self.master_addr,
            "master_port": str(self.master_port),
        }

    def env(self) -> dict[str, str]:
        """The variables from which `find_place` reads the same place."""
        names = {"nodes": "NNODES", "node_rank": "NODE_RANK", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
        return {names[name]: value for name, value in self.facts().items()}


def find_place(env: Mapping[str, str]) -> Place:
    """The place that the environment tells; a machine that nobody told anything is the only one.

    Raises:
        UserError: a variable is missing beside others, or is no number.
    """
    port = _number(env, "MASTER_PORT", DEFAULT_PORT)
    if "NNODES" in env:
        nodes = _number(env, "NNODES", 1)
        if nodes == 1:
            return Place(master_port=port)
        _require(env, "NNODES", "NODE_RANK", "MASTER_ADDR")
        return _checked(Place(_number(env, "NODE_RANK", 0), nodes, env["MASTER_ADDR"], port))
    if "SLURM_NODEID" in env:
        hosts = expand_hosts(env.get("SLURM_JOB_NODELIST", ""))
        nodes = _number(env, "SLURM_JOB_NUM_NODES", len(hosts) or 1)
        return _checked(Place(_number(env, "SLURM_NODEID", 0), nodes, env.get("MASTER_ADDR") or (hosts or ["127.0.0.1"])[0], port))
    if "PET_NNODES" in env:
        _require(env, "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
        port = _number(env, "PET_MASTER_PORT", port)
        return _checked(Place(_number(env, "PET_NODE_RANK", 0), _number(env, "PET_NNODES", 1), env["PET_MASTER_ADDR"], port))
    if "VC_WORKER_HOSTS" in env:
        hosts = env["VC_WORKER_HOSTS"].split(",")
        return _checked(Place(_number(env, "VC_TASK_INDEX", 0), _number(env, "VC_WORKER_NUM", len(hosts)), hosts[0], port))
    return Place(master_port=port)


def expand_hosts(text: str) -> list[str]:
    """The names of a Slurm node list: `gpu[01-03,7],login` is gpu01 gpu02 gpu03 gpu7 login."""
    names: list[str] = []
    for prefix, ranges, suffix in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", text):
        if not ranges:
            names.append(prefix + suffix)
            continue
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            names += [f"{prefix}{number:0{len(first)}d}{suffix}" for number in range(int(first), int(last or first) + 1)]
    return names


def interface_toward(address: str) -> str | None:
    """The network interface over which this machine reaches an address; None where there is no way, or no name for it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: the kernel only chooses the way
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == own for found in addresses):
            return name
    return None


def interface_env(env: Mapping[str, str], address: str) -> dict[str, str]:
    """The interface variables that nobody has set, each naming the interface toward an address."""
    name = interface_toward(address)
    return {variable: name for variable in INTERFACE_VARIABLES if name and variable not in env}


def _require(env: Mapping[str, str], *names: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise UserError(
            missing[0],
            f"is not set, but {names[0]}={env[names[0]]} says that there are several nodes; export {missing[0]}=...",
            f"未设置，但 {names[0]}={env[names[0]]} 表明有多个节点；请 export {missing[0]}=...",
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit():
        raise UserError(name, f"'{text}' is no number", f"'{text}' 不是数字")
    return int(text)


def _checked(place: Place) -> Place:
    if not 0 <= place.rank < place.nodes:
        raise UserError(
            "NODE_RANK", f"{place.rank} is not below the number of nodes, {place.nodes}", f"{place.rank} 不小于节点数 {place.nodes}"
        )
    return place

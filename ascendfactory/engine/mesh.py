"""The processes of a run and how they are arranged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ascendfactory.core.plan import Layout
from ascendfactory.engine import device as devices

AXES = ("pp", "replicate", "shard", "tp")  # outermost first: tp's partners are neighbours, so inside a node


@dataclass(frozen=True)
class Axis:
    """This process's place along one axis of the layout. `group` joins those along it; None where no message is ever sent."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This process's place among all.

    `fsdp` is None where nothing is sharded by data parallelism, else a mesh of axes (replicate, shard); its shard axis runs over
    the devices of dp and of context parallelism, which hold the same weights and see different tokens.
    `data` counts the devices that read different rows: replicate × shard; tp, pp, ring and ulysses partners read the same ones.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    fsdp: DeviceMesh | None = None
    data: Axis = Axis()
    pp: Axis = Axis()
    ring: Axis = Axis()
    ulysses: Axis = Axis()
    tp: Axis = Axis()

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    @property
    def cp(self) -> int:
        """Devices that share the tokens of a row."""
        return self.ring.size * self.ulysses.size

    @property
    def readers(self) -> int:
        """Devices that read the same rows as this one, itself included."""
        return self.pp.size * self.cp * self.tp.size

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all processes, in fp64."""
        if self.size == 1:
            return values
        # on CPU, so that gloo carries it: HCCL has no fp64
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(v) for v in total]

    def max(self, value: float) -> float:
        """The largest over all processes."""
        if self.size == 1:
            return value
        top = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        return float(top)

    def barrier(self) -> None:
        """Waits for all processes."""
        self.sum([0.0])


def make_mesh(layout: Layout, device_kind: str, *, sharded: bool) -> Mesh:
    """Joins the processes that torchrun started.

    Args:
        layout: degrees; dp = replicate × shard.
        device_kind: `cpu`, `cuda` or `npu`.
        sharded: whether FSDP is needed (it is on one process too, for mixed precision).

    Raises:
        ValueError: the number of processes is not that of the layout.
    """
    device = devices.local_device(device_kind)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size != layout.num_devices:
        raise ValueError(f"the plan is for {layout.num_devices} processes, but {size} were started")
    if size == 1 and not sharded:
        return Mesh(device)
    if not dist.is_initialized():
        _join(device_kind, size)
    shard = layout.dp // layout.replicate
    grid = init_device_mesh(device.type, (layout.pp, layout.replicate, shard * layout.cp, layout.tp), mesh_dim_names=AXES)
    fsdp = (grid["replicate", "shard"] if layout.replicate > 1 else grid["shard"]) if sharded else None
    readers = grid["shard"]._unflatten(0, (shard, layout.ring, layout.ulysses), ("data", "ring", "ulysses"))
    data_rank = grid.get_local_rank("replicate") * shard + readers.get_local_rank("data")
    axes = (_axis(part) for part in (grid["pp"], readers["ring"], readers["ulysses"], grid["tp"]))
    return Mesh(device, rank, size, fsdp, Axis(layout.dp, data_rank), *axes)


def _join(device_kind: str, size: int) -> None:
    backend = devices.collective_backend(device_kind)
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        timeout = timedelta(minutes=30)
        store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts all processes again: the addresses of those before must not be found there
        attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=timeout)


def _axis(mesh: DeviceMesh) -> Axis:
    return Axis(mesh.size(), mesh.get_local_rank(), mesh.get_group()) if mesh.size() > 1 else Axis()

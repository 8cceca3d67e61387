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


@dataclass(frozen=True)
class Mesh:
    """This process's place. `dp` is None for a process on its own, else a mesh of axes (replicate, shard)."""

    device: torch.device
    rank: int
    size: int
    dp: DeviceMesh | None

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all processes, in fp64."""
        if self.dp is None:
            return values
        # on CPU, so that gloo carries it: HCCL has no fp64
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(v) for v in total]

    def max(self, value: float) -> float:
        """The largest over all processes."""
        if self.dp is None:
            return value
        top = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        return float(top)

    def barrier(self) -> None:
        """Waits for all processes."""
        self.sum([0.0])


def make_mesh(layout: Layout, device_kind: str, *, grouped: bool) -> Mesh:
    """Joins the processes that torchrun started.

    Args:
        layout: degrees; dp = replicate × shard.
        device_kind: `cpu`, `cuda` or `npu`.
        grouped: whether FSDP is needed (it is on one process too, for mixed precision).

    Raises:
        ValueError: the number of processes is not that of the layout.
    """
    device = devices.local_device(device_kind)
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size != layout.dp:
        raise ValueError(f"the plan is for {layout.dp} processes, but {size} were started")
    if not grouped:
        return Mesh(device, rank, size, None)
    if not dist.is_initialized():
        if size == 1:
            store = dist.HashStore()
            dist.init_process_group(devices.collective_backend(device_kind), store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(devices.collective_backend(device_kind), timeout=timedelta(minutes=30))
    mesh = init_device_mesh(device.type, (layout.replicate, layout.shard), mesh_dim_names=("replicate", "shard"))
    return Mesh(device, rank, size, mesh)

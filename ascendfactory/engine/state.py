"""Everything of a run that is a tensor, by its public name, and how it becomes whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ascendfactory.engine import device as devices
from ascendfactory.engine.kept import Kept
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.names import pieces_of, public_name
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.pieces import whole

MOMENTS = ("exp_avg", "exp_avg_sq")


def trained_tensors(model: nn.Module) -> dict[str, Kept]:
    """Public name → trainable parameter of this pipeline stage (the rest is in the model folder, unchanged)."""
    give_back_whole_weights(model)
    pieces = pieces_of(model)
    trained = {public_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    return {name: Kept(p, pieces.get(name)) for name, p in trained.items()}


def give_back_whole_weights(model: nn.Module) -> None:
    """After an evaluation FSDP still holds some weights whole and in the compute dtype; the masters are the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gradients(model: nn.Module) -> dict[str, Kept]:
    """Public name → gradient, of all parameters that have one."""
    return {name: replace(kept, of=kept.parameter.grad) for name, kept in trained_tensors(model).items() if kept.parameter.grad is not None}


def tensor_state(optimizer: Optimizer, mesh: Mesh) -> dict[str, Kept]:
    """Everything of a run that is a tensor; live (but for weights whose fp32 value is joined from two halves)."""
    state = {}
    for slot in optimizer.slots.values():
        state[f"model.{slot.name}"] = Kept(slot.parameter, slot.piece, slot.master())
        for kind in MOMENTS:
            state[f"{kind}.{slot.name}"] = Kept(slot.parameter, slot.piece, getattr(slot, kind))
    return state | {f"rng.{kind}.{_place(mesh)}": Kept(t) for kind, t in devices.rng_state(mesh.device).items()}


def _place(mesh: Mesh) -> str:
    """This process among those of this very layout: under another one, partners would get states that they must not share."""
    axes = {"pp": mesh.pp, "dp": mesh.data, "ring": mesh.ring, "ulysses": mesh.ulysses, "tp": mesh.tp}
    return f"{mesh.rank}@" + ",".join(f"{name}{axis.size}" for name, axis in axes.items())


def iter_whole(tensors: Mapping[str, Kept], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Each tensor gathered whole, one at a time; every process must take part, to the end.

    A process yields the tensors of its pipeline stage; the first one then yields those of the other stages as well. A tensor that
    two stages hold comes from the earlier one.
    """
    facts: list[dict[str, Any]] = [{}] * mesh.pp.size
    if mesh.pp.size > 1:
        mine = {name: (kept.shape, (kept.parameter if kept.of is None else kept.of).dtype) for name, kept in tensors.items()}
        dist.all_gather_object(facts, mine, group=mesh.pp.group)
    earlier = {name for stage in facts[: mesh.pp.rank] for name in stage}
    # rank 0 is in one group along the pipeline: only its members send
    leads = mesh.pp.size > 1 and dist.get_process_group_ranks(mesh.pp.group)[0] == 0
    for name, kept in tensors.items():
        if name in earlier:
            continue
        tensor = whole(kept.parameter, kept.piece, mesh, kept.of)
        if leads and mesh.pp.rank > 0:
            dist.send(tensor.contiguous(), group_dst=0, group=mesh.pp.group)
        yield name, tensor
    if leads and mesh.is_first:
        yield from _received(facts, mesh)


def _received(facts: list[dict[str, Any]], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    seen = set(facts[0])
    for stage in range(1, mesh.pp.size):
        for name, (shape, dtype) in facts[stage].items():
            if name not in seen:
                seen.add(name)
                tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
                dist.recv(tensor, group_src=stage, group=mesh.pp.group)
                yield name, tensor

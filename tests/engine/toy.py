"""A net of bare weights cut by hand in every way, with gradients that do not depend on the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Optim, Warmup
from ascendfactory.engine.kept import Kept
from ascendfactory.engine.mesh import Mesh, make_mesh
from ascendfactory.engine.model import name_seed
from ascendfactory.engine.optim import Optimizer
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from ascendfactory.engine.parallel.pieces import Piece, chunks, whole_piece, write
from ascendfactory.engine.state import trained_tensors

SHAPES = {"embed.weight": (11, 6), "up.weight": (10, 6), "gate_up.weight": (12, 6), "down.weight": (6, 7), "norm.weight": (5,)}
LAYOUTS = {
    "one": Layout(),
    "fsdp2": Layout(dp=2),
    "hsdp2": Layout(dp=2, replicate=2),
    "tp2": Layout(tp=2),
    "tp2 x fsdp2": Layout(tp=2, dp=2),
    "pp2": Layout(pp=2),
    "pp2 x tp2": Layout(pp=2, tp=2),
}
STAGES = (("embed.weight", "up.weight", "norm.weight"), ("gate_up.weight", "down.weight", "embed.weight"))
OPTIM = Optim(lr=0.05, warmup=Warmup(amount=0.0, unit="steps"), schedule="constant", weight_decay=0.1, max_grad_norm=3.0)


class Holder(nn.Module):
    """One weight under the name `weight`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)


def numbers(kind: str, name: str) -> Tensor:
    """The whole tensor of this kind and name, the same everywhere."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(name_seed(0, f"{kind} {name}")))


def cut(name: str, mesh: Mesh) -> Piece | None:
    """This rank's piece: uneven rows, two intervals, columns; a norm on both tensor-parallel ranks; an embedding on both stages."""
    shape, tp = SHAPES[name], mesh.tp
    piece = whole_piece(shape)
    if tp.size == 2:
        if name == "norm.weight":
            piece = whole_piece(shape, copies=2, partial_over=tp.group)
        elif name == "gate_up.weight":
            piece = Piece(shape, 0, ((3 * tp.rank, 3 * tp.rank + 3), (6 + 3 * tp.rank, 9 + 3 * tp.rank)))
        else:
            dim = 1 if name == "down.weight" else 0
            middle = -(-shape[dim] // 2)
            piece = Piece(shape, dim, ((0, middle),) if tp.rank == 0 else ((middle, shape[dim]),))
    if mesh.pp.size == 2 and name == "embed.weight":
        piece = replace(piece, copies=2 * piece.copies, partial_over=mesh.pp.group)
    return None if piece.is_whole and piece.copies == 1 else piece


def build(layout: Layout, optim: Optim = OPTIM, **layout_changes: Any) -> tuple[nn.Module, Optimizer, Mesh]:
    """The net of this rank, its optimizer and mesh."""
    layout = layout.model_copy(update=layout_changes)
    mesh = make_mesh(layout, "cpu", sharded=layout.shard * layout.replicate > 1)
    net = nn.Module()
    net.pieces = {}
    names = STAGES[mesh.pp.rank] if mesh.pp.size == 2 else tuple(SHAPES)
    for name in names:
        if piece := cut(name, mesh):
            net.pieces[name] = piece
            lengths = list(piece.shape)
            lengths[piece.dim] = sum(stop - start for start, stop in piece.intervals)
        net.add_module(name.removesuffix(".weight"), Holder(torch.zeros(lengths if piece else SHAPES[name])))
    if mesh.fsdp is not None:
        apply_fsdp(net, [], mesh.fsdp, layout, torch.float32)
    with torch.no_grad():
        for name, kept in trained_tensors(net).items():
            write(kept.parameter, kept.piece, numbers("weight", name))
    return net, Optimizer(net, optim, layout, 10, mesh), mesh


def give_gradients(net: nn.Module, step: int) -> None:
    """Every device's part of the gradient of a step; where partners see parts of a sum, equal shares of it."""
    for name, kept in trained_tensors(net).items():
        value = numbers(f"gradient {step}", name)
        if kept.piece is not None and kept.piece.partial_over is not None:
            value = value / dist.get_world_size(kept.piece.partial_over)
        parameter = kept.parameter
        part = torch.zeros_like(parameter.to_local() if isinstance(parameter, DTensor) else parameter, dtype=torch.float32)
        for chunk in chunks(parameter, kept.piece, part):
            chunk.tensor.copy_(value[chunk.box])
        grad = part.to(parameter.dtype)
        parameter.grad = DTensor(grad, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else grad


def train(net: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    """Some steps; their gradient norms."""
    norms = []
    for step in steps:
        give_gradients(net, step)
        norms.append(optimizer.gradient_norm(0.0)[1])
        optimizer.step(step, norms[-1])
    return norms


def without_rng(state: dict[str, Kept]) -> dict[str, Kept]:
    """What does not belong to one rank."""
    return {name: kept for name, kept in state.items() if not name.startswith("rng.")}

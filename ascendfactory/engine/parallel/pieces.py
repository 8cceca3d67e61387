"""Which part of a Hugging Face tensor this device holds, and where that part lies in the whole.

Weights are loaded, saved, exported and resumed by these places alone, so no file knows the layout it was written under.
Tensor parallelism cuts a weight into intervals along one dimension; FSDP then cuts what is left by rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from ascendfactory.engine.mesh import Axis, Mesh


@dataclass(frozen=True)
class Piece:
    """A device's part of a whole tensor before FSDP cuts it: intervals along one dimension, joined in this order.

    `copies` counts the devices that hold this very part outside FSDP's axes (tensor-parallel partners of a norm, both ends
    of a pipeline for a tied embedding): its gradient must enter the global norm once. Where each of them sees only a part of
    the gradient, `partial_over` joins them, and the gradients are summed over it once a step.
    """

    shape: tuple[int, ...]  # of the whole tensor
    dim: int
    intervals: tuple[tuple[int, int], ...]  # (start, stop) along dim
    copies: int = 1
    partial_over: dist.ProcessGroup | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the tensor is elsewhere."""
        return not self.shape or self.intervals == ((0, self.shape[self.dim]),)


def whole_piece(shape: tuple[int, ...], *, copies: int = 1, partial_over: dist.ProcessGroup | None = None) -> Piece:
    """The piece of a device that holds all of a tensor."""
    return Piece(tuple(shape), 0, ((0, shape[0]),) if shape else (), copies, partial_over)


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor and the live view that holds it."""

    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def box(self) -> tuple[slice, ...]:
        """The same as slices of the whole tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.tensor.shape, strict=True))


def local(tensor: Tensor) -> Tensor:
    """This device's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def chunks(parameter: Tensor, piece: Piece | None, of: Tensor | None = None) -> Iterator[Chunk]:
    """The boxes of the whole tensor that this device holds.

    Args:
        parameter: as it is stored: plain, or cut by FSDP (a DTensor whose "global" shape is the tensor-parallel part's).
        piece: what tensor parallelism left of the whole; None: all.
        of: a tensor laid out as the parameter's local part (a moment, a gradient); None: the parameter's own values.
    """
    values = local(parameter if of is None else of)
    if values.numel() == 0:
        return
    first_row = 0
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        first_row = offset[0] if offset else 0
    yield from boxes(values, piece, first_row)


def boxes(values: Tensor, piece: Piece | None, first_row: int) -> Iterator[Chunk]:
    """Where rows of a piece, from `first_row` on, lie in the whole tensor.

    Args:
        values: the rows that this device holds, at least one element.
        piece: of which they are rows; None: of the whole tensor.
        first_row: the first of them.
    """
    if piece is None or not piece.intervals:
        yield Chunk((first_row,) + (0,) * (values.ndim - 1) if values.ndim else (), values)
    elif piece.dim == 0:
        yield from _row_chunks(values, piece, first_row)
    else:
        yield from _column_chunks(values, piece, first_row)


def _row_chunks(values: Tensor, piece: Piece, first_row: int) -> Iterator[Chunk]:
    at = 0  # row of the tensor-parallel part where the interval begins
    for start, stop in piece.intervals:
        low, high = max(at, first_row), min(at + stop - start, first_row + values.shape[0])
        if low < high:
            yield Chunk((start + low - at,) + (0,) * (values.ndim - 1), values[low - first_row : high - first_row])
        at += stop - start


def _column_chunks(values: Tensor, piece: Piece, first_row: int) -> Iterator[Chunk]:
    at = 0
    for start, stop in piece.intervals:
        offset = [first_row] + [0] * (values.ndim - 1)
        offset[piece.dim] = start
        if start < stop:
            yield Chunk(tuple(offset), values.narrow(piece.dim, at, stop - start))
        at += stop - start


def write(parameter: Tensor, piece: Piece | None, value: Tensor | Any) -> None:
    """Copies this device's part of a whole tensor into a parameter.

    Args:
        value: the whole tensor, or a safetensors slice of it (only what is needed is then read).
    """
    for chunk in chunks(parameter, piece):
        chunk.tensor.copy_(value[chunk.box] if chunk.offset else value[:] if not isinstance(value, Tensor) else value)


@torch.no_grad()
def whole(parameter: Tensor, piece: Piece | None, mesh: Mesh, of: Tensor | None = None) -> Tensor:
    """The whole tensor on every process of the pipeline stage, all of which must take part.

    Args:
        parameter, piece, of: as for `chunks`; `of` may also be a DTensor (a gradient).
    """
    values = (parameter if of is None else of).detach()
    if isinstance(parameter, DTensor):
        if not isinstance(values, DTensor):
            # the constructor, because from_local would ask the other processes for their shapes
            values = DTensor(values.to(parameter.device), parameter._spec, requires_grad=False)
        values = values.full_tensor()
    # copies tell a tensor that every partner holds from one whose partners hold nothing of it
    if piece is None or mesh.tp.size == 1 or (piece.is_whole and piece.copies > 1):
        return values
    return _gather(values.contiguous(), piece, mesh.tp)


def _gather(values: Tensor, piece: Piece, axis: Axis) -> Tensor:
    """Joins the parts of an axis; each travels once, at its own size."""
    facts: list[Any] = [None] * axis.size
    dist.all_gather_object(facts, (tuple(values.shape), piece.intervals), group=axis.group)
    joined = values.new_empty(piece.shape)
    known: set[Any] = set()
    for source, (shape, intervals) in enumerate(facts):
        if intervals in known:
            continue
        known.add(intervals)
        part = values if source == axis.rank else values.new_empty(shape)
        if part.numel():
            dist.broadcast(part, group_src=source, group=axis.group)
        at = 0
        for start, stop in intervals:
            joined.narrow(piece.dim, start, stop - start).copy_(part.narrow(piece.dim, at, stop - start))
            at += stop - start
    return joined

"""Pieces: every way of cutting tiles the whole tensor exactly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascendfactory.engine.parallel.pieces import Piece, boxes, chunks, local, whole_piece, write


def rows_of(length: int, size: int, rank: int) -> tuple[int, int]:
    """FSDP2 cuts as torch.chunk does: equal parts rounded up, the last ones smaller or empty."""
    each = -(-length // size)
    return min(rank * each, length), min((rank + 1) * each, length)


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[Piece], int]:
    """A shape, the pieces of all tensor-parallel ranks (one to three bands, each cut anywhere), and FSDP's degree."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    tp = draw(st.integers(1, 4))
    inner = draw(st.lists(st.integers(0, shape[dim]), max_size=2))
    bands = list(pairwise([0, *sorted(inner), shape[dim]]))
    intervals: list[list[tuple[int, int]]] = [[] for _ in range(tp)]
    for start, stop in bands:
        points = [start, *sorted(draw(st.lists(st.integers(start, stop), min_size=tp - 1, max_size=tp - 1))), stop]
        for rank, part in enumerate(pairwise(points)):
            intervals[rank].append(part)
    return shape, [Piece(shape, dim, tuple(own)) for own in intervals], draw(st.integers(1, 4))


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    return torch.cat([whole.narrow(piece.dim, start, stop - start) for start, stop in piece.intervals], piece.dim)


@settings(deadline=None, max_examples=200)
@given(cuts())
def test_all_ranks_tile_the_tensor_once(case: tuple[tuple[int, ...], list[Piece], int]) -> None:
    shape, pieces, shards = case
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    rebuilt, seen = torch.zeros_like(numbers), torch.zeros_like(numbers)
    for piece in pieces:
        part = part_of(numbers, piece)
        for rank in range(shards):
            low, high = rows_of(part.shape[0], shards, rank)
            if not (rows := part[low:high]).numel():
                continue
            for chunk in boxes(rows, piece, low):
                assert torch.equal(numbers[chunk.box], chunk.tensor)
                rebuilt[chunk.box] = chunk.tensor
                seen[chunk.box] += 1
    assert torch.equal(rebuilt, numbers)
    assert seen.unique().tolist() == [1]


@settings(deadline=None, max_examples=100)
@given(cuts())
def test_write_takes_what_belongs_here(case: tuple[tuple[int, ...], list[Piece], int]) -> None:
    shape, pieces, _ = case
    numbers = torch.rand(shape)
    for piece in pieces:
        expected = part_of(numbers, piece)
        parameter = torch.full_like(expected, -1)
        write(parameter, piece, numbers)
        assert torch.equal(parameter, expected)


def test_chunks_are_live_views() -> None:
    parameter, moment = torch.zeros(4, 2), torch.ones(4, 2)
    piece = Piece((8, 2), 0, ((0, 2), (4, 6)))
    for chunk in chunks(parameter, piece):
        chunk.tensor.fill_(chunk.offset[0] + 1)
    assert parameter[:, 0].tolist() == [1, 1, 5, 5]
    assert [chunk.offset for chunk in chunks(parameter, piece, moment)] == [(0, 0), (4, 0)]
    assert all(chunk.tensor.eq(1).all() for chunk in chunks(parameter, piece, moment))


def test_scalars_and_whole_pieces() -> None:
    (chunk,) = chunks(torch.tensor(3.0), whole_piece(()))
    assert (chunk.offset, chunk.box, chunk.tensor.item()) == ((), (), 3.0)
    assert whole_piece((3, 2)).is_whole
    assert whole_piece(()).is_whole
    assert not Piece((4,), 0, ((0, 2),)).is_whole
    assert local(torch.ones(2)).shape == (2,)

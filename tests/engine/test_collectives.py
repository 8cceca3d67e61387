"""Gather, scatter and sum over devices: values and gradients against one process that holds all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ascendfactory.engine.mesh import Axis
from ascendfactory.engine.parallel import collectives
from ascendfactory.engine.parallel.collectives import Parallel, interval
from tests.pool import Pool


@given(st.integers(1, 12), st.integers(0, 1000))
def test_intervals_join_to_the_whole_and_differ_by_one(size: int, num: int) -> None:
    parts = [interval(num, Axis(size, rank)) for rank in range(size)]
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == num
    lengths = [stop - start for start, stop in parts]
    assert max(lengths) - min(lengths) <= 1


def draw(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank))


def one_function(name: str, sequence: bool, shape: tuple[int, ...], out_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Value, and gradient of a function of this rank, under an outer gradient of its own."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel = Parallel(Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD), sequence)
    x = draw(0 if name == "scatter" else dist.get_rank(), *shape).requires_grad_()
    y = getattr(collectives, name)(x, parallel)
    y.backward(draw(50 + dist.get_rank(), *out_shape))
    return y.detach(), x.grad


@pytest.mark.parametrize("rows", [1, 3])
def test_values_and_gradients(rows: int, pool: Pool) -> None:
    """Whole tensors are [rows, 6, 5], parts of two devices [rows, 3, 5]."""
    part, whole = (rows, 3, 5), (rows, 6, 5)
    wholes, parts = [draw(r, *whole) for r in (0, 1)], [draw(r, *part) for r in (0, 1)]
    outer_wholes, outer_parts = [draw(50 + r, *whole) for r in (0, 1)], [draw(50 + r, *part) for r in (0, 1)]
    halves = [slice(0, 3), slice(3, 6)]

    def check(results: list[Any], values: list[Tensor], grads: list[Tensor]) -> None:
        for (value, grad), right, right_grad in zip(results, values, grads, strict=True):
            torch.testing.assert_close(value, right)
            torch.testing.assert_close(grad, right_grad)

    summed, outer_sum = wholes[0] + wholes[1], outer_wholes[0] + outer_wholes[1]
    check(pool.run(one_function, 2, "enter", True, part, whole), [torch.cat(parts, 1)] * 2, [outer_sum[:, at] for at in halves])
    check(pool.run(one_function, 2, "enter", False, whole, whole), wholes, [outer_sum] * 2)
    check(pool.run(one_function, 2, "leave", True, whole, part), [summed[:, at] for at in halves], [torch.cat(outer_parts, 1)] * 2)
    check(pool.run(one_function, 2, "leave", False, whole, whole), [summed] * 2, outer_wholes)
    check(pool.run(one_function, 2, "scatter", True, whole, part), [wholes[0][:, at] for at in halves], [torch.cat(outer_parts, 1)] * 2)


def chunked(rows: int, num_chunks: int) -> tuple[Tensor, Tensor]:
    """A gather in chunks, and a sum in chunks, each joined again."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel = Parallel(Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD), True, num_chunks)
    gathered = [p.wait() for p in collectives.start_gather(draw(dist.get_rank(), rows, 4, 5), parallel, num_chunks)]
    whole = draw(dist.get_rank(), rows, 8, 5)
    reduced = [collectives.start_reduce(parallel.chunk(whole, number, num_chunks), parallel) for number in range(num_chunks)]
    return collectives.join_gathered(gathered, parallel), collectives.join_reduced(reduced)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_chunks_join_to_what_one_message_gives(rows: int, num_chunks: int, pool: Pool) -> None:
    total = draw(0, rows, 8, 5) + draw(1, rows, 8, 5)
    for rank, (gathered, reduced) in enumerate(pool.run(chunked, 2, rows, num_chunks)):
        torch.testing.assert_close(gathered, torch.cat([draw(0, rows, 4, 5), draw(1, rows, 4, 5)], 1))
        torch.testing.assert_close(reduced, total[:, rank * 4 : rank * 4 + 4])


def test_number_of_chunks_divides_the_positions() -> None:
    assert [Parallel(Axis(2), True, 4).num_chunks(length) for length in (8, 6, 7)] == [4, 3, 1]
    assert Parallel(Axis(), True, 4).num_chunks(8) == 1


def test_rows_that_cannot_be_shared_out() -> None:
    with pytest.raises(ValueError, match="rows of 7 positions cannot be cut for 2 devices"):
        Parallel(Axis(2), True).local_positions(7)


def test_one_device_sends_nothing() -> None:
    x = torch.ones(1, 2, 3)
    for function in (collectives.enter, collectives.leave):
        assert function(x, collectives.ALONE) is x


def test_the_fused_kernel_is_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such device here: a stand-in shows what reaches the kernel."""
    asked: list[Any] = []

    def kernel(x: Tensor, weight: Tensor, name: str, *, reduce_op: str, comm_turn: int) -> Tensor:
        asked.append((tuple(x.shape), tuple(weight.shape), name, reduce_op, comm_turn))
        return x.new_empty(x.shape[0], weight.shape[1])

    backend = SimpleNamespace(get_hccl_comm_name=lambda rank: f"group of rank {rank}")
    group: Any = SimpleNamespace(_get_backend=lambda device: backend)
    x, weight = torch.empty(2, 3, 4, device="meta"), torch.empty(5, 4, device="meta")
    assert collectives.fused_matmul_reduce(x, weight, Parallel(Axis(2, 1, group))) is None
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu_mm_all_reduce_base=kernel))
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: 7)
    out = collectives.fused_matmul_reduce(x, weight, Parallel(Axis(2, 1, group)))
    assert out is not None
    assert out.shape == (2, 3, 5)
    assert asked == [((6, 4), (4, 5), "group of rank 7", "sum", 0)]
    assert collectives.fused_matmul_reduce(x, weight, Parallel(Axis(2, 1, group), sequence=True)) is None

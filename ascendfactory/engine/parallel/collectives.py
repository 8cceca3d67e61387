"""Collectives of tensor and sequence parallelism, on plain tensors, with their gradients.

Shape letters: B rows, S positions of a row, s positions of one device (S / devices), c positions of one chunk of s,
R devices of the axis, M any width.

Under sequence parallelism device r holds positions r·s … (r+1)·s - 1 of each row. A chunk takes the same c positions of every
device, so that what is gathered or scattered at once is [R, B, c, M], contiguous, whatever the number of rows.
Summing functions are pairs (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198): the backward
pass of a gather is a reduce-scatter and the other way round; that of a sum is the identity and the other way round.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascendfactory.engine.mesh import Axis


@dataclass
class Parallel:
    """How a layer's linear modules work together along the tensor-parallel axis; one object for all modules of a model.

    Args:
        axis: the devices that share each weight; of size 1, none do.
        sequence: whether between the layers each device holds its positions only (sequence parallelism).
        overlap_chunks: pieces in which inputs and outputs travel while others are multiplied; 1 = all at once.
        regather: whether the backward pass gathers the input of a layer again instead of keeping it whole.
    """

    axis: Axis
    sequence: bool = False
    overlap_chunks: int = 1
    regather: bool = True

    def num_chunks(self, local_positions: int) -> int:
        """The number of chunks in use: the largest up to `overlap_chunks` that divides the positions."""
        if self.axis.size == 1:
            return 1
        return max(n for n in range(1, self.overlap_chunks + 1) if local_positions % n == 0)

    def local_positions(self, positions: int) -> int:
        """Positions of a row on one device, between the layers.

        Raises:
            ValueError: they cannot be shared out evenly.
        """
        if not self.sequence:
            return positions
        if positions % self.axis.size:
            raise ValueError(f"rows of {positions} positions cannot be cut for {self.axis.size} devices; pad them to a multiple")
        return positions // self.axis.size

    def chunk(self, whole_BSM: Tensor, number: int, num_chunks: int) -> Tensor:
        """One chunk of a whole tensor: a view [R, B, c, M] under sequence parallelism, else [B, c, M]."""
        if self.sequence:
            return whole_BSM.unflatten(1, (self.axis.size, num_chunks, -1))[:, :, number].transpose(0, 1)
        return whole_BSM if num_chunks == 1 else whole_BSM.unflatten(1, (num_chunks, -1))[:, number]


ALONE = Parallel(Axis())


class Pending:
    """A tensor that a collective is still filling."""

    def __init__(self, tensor: Tensor, work: Any = None) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> Tensor:
        """The tensor, filled."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor


class Gathered:
    """An input at all positions, flat: [T, M]; gathered when `start` is called, or when it is first asked for.

    Args:
        part: what the device keeps of it.
        parallel: how it is shared out; None: `part` is all of it.
    """

    def __init__(self, part: Tensor, parallel: Parallel | None) -> None:
        self._parallel = parallel
        self._part: Tensor | None = part
        self._pending: list[Pending] = []
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Sends for the other devices' parts, if any are missing."""
        if self._parallel is not None and self._part is not None:
            self._pending, self._part = start_gather(self._part, self._parallel, 1), None

    def wait(self) -> Tensor:
        """All positions."""
        if self._whole is None:
            self.start()
            whole = self._part if self._parallel is None else join_gathered([p.wait() for p in self._pending], self._parallel)
            assert whole is not None
            self._whole, self._part, self._pending = whole.reshape(-1, whole.shape[-1]), None, []
        return self._whole


def interval(size: int, axis: Axis) -> tuple[int, int]:
    """(start, stop) of this device's part of `size` things; parts differ by one at most.

    >>> interval(10, Axis(4, 1))
    (2, 5)
    """
    return size * axis.rank // axis.size, size * (axis.rank + 1) // axis.size


def start_gather(part_BsM: Tensor, parallel: Parallel, num_chunks: int) -> list[Pending]:
    """Starts gathering what the devices hold, chunk by chunk.

    Returns:
        Chunks in the form of `Parallel.chunk`. Without sequence parallelism they are there already, and nothing is sent.
    """
    if not parallel.sequence:
        return [Pending(parallel.chunk(part_BsM, number, num_chunks)) for number in range(num_chunks)]
    pending = []
    for part_BcM in part_BsM.chunk(num_chunks, dim=1):
        out_RBcM = part_BcM.new_empty((parallel.axis.size, *part_BcM.shape))
        work = dist.all_gather_into_tensor(out_RBcM.flatten(0, 1), part_BcM.contiguous(), group=parallel.axis.group, async_op=True)
        pending.append(Pending(out_RBcM, work))
    return pending


def join_gathered(chunks: list[Tensor], parallel: Parallel) -> Tensor:
    """The whole tensor [B, S, M] of gathered chunks; a view where the chunk is one and so is the row."""
    if not parallel.sequence:
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=1)
    whole_BRncM = torch.stack(chunks, dim=2).transpose(0, 1) if len(chunks) > 1 else chunks[0].transpose(0, 1).unsqueeze(2)
    return whole_BRncM.flatten(1, 3)


def start_reduce(part: Tensor, parallel: Parallel) -> Pending:
    """Starts summing one chunk over the devices; the given tensor is used up.

    Args:
        part: in the form of `Parallel.chunk`.

    Returns:
        The device's own positions [B, c, M] under sequence parallelism, else all of the chunk's.
    """
    if parallel.axis.size == 1:
        return Pending(part)
    part = part.contiguous()
    if not parallel.sequence:
        return Pending(part, dist.all_reduce(part, group=parallel.axis.group, async_op=True))
    out_BcM = part.new_empty(part.shape[1:])
    work = dist.reduce_scatter_tensor(out_BcM, part.flatten(0, 1), group=parallel.axis.group, async_op=True)
    return Pending(out_BcM, work)


def join_reduced(pending: list[Pending]) -> Tensor:
    """The device's positions of all chunks, in order."""
    return pending[0].wait() if len(pending) == 1 else torch.cat([p.wait() for p in pending], dim=1)


def _gather(x_BsM: Tensor, parallel: Parallel) -> Tensor:
    return join_gathered([p.wait() for p in start_gather(x_BsM, parallel, 1)], parallel)


def _reduce(x_BSM: Tensor, parallel: Parallel) -> Tensor:
    if parallel.sequence:
        parallel.local_positions(x_BSM.shape[1])
        return start_reduce(parallel.chunk(x_BSM, 0, 1), parallel).wait()
    return start_reduce(x_BSM.clone(memory_format=torch.contiguous_format), parallel).wait()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return _gather(x, parallel) if parallel.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce(grad, ctx.parallel), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return _reduce(x, parallel)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (_gather(grad, ctx.parallel) if ctx.parallel.sequence else grad), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSM: Tensor, parallel: Parallel) -> Tensor:
        ctx.parallel = parallel
        return x_BSM.narrow(1, parallel.axis.rank * (s := parallel.local_positions(x_BSM.shape[1])), s).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.parallel), None


def enter(x: Tensor, parallel: Parallel) -> Tensor:
    """What the devices hold → the same whole tensor on all, whose uses differ, so that its gradients must be summed.

    Under sequence parallelism: [B, s, M] → [B, S, M] by an all-gather, backward a reduce-scatter. Else the identity, backward an
    all-reduce.
    """
    if parallel.axis.size == 1:
        return x
    whole: Tensor = _Enter.apply(x, parallel)
    return whole


def leave(x_BSM: Tensor, parallel: Parallel) -> Tensor:
    """Parts of a sum, one on each device → the sum.

    Under sequence parallelism each device gets its positions [B, s, M] by a reduce-scatter, backward an all-gather. Else all get
    all by an all-reduce, backward the identity.
    """
    if parallel.axis.size == 1:
        return x_BSM
    total: Tensor = _Leave.apply(x_BSM, parallel)
    return total


def scatter(x_BSM: Tensor, parallel: Parallel) -> Tensor:
    """The same whole tensor on all devices → the device's positions [B, s, M]; backward an all-gather. Nothing is cut without
    sequence parallelism."""
    if not parallel.sequence:
        return x_BSM
    part: Tensor = _Scatter.apply(x_BSM, parallel)
    return part


def fused_matmul_reduce(x_BSF: Tensor, weight_MF: Tensor, parallel: Parallel) -> Tensor | None:
    """x Wᵀ summed over the devices by the device's own fused kernel (Ascend's MC2), which sends a tile while it multiplies the next.

    Returns:
        [B, S, M] on every device, or None where there is no such kernel (or the positions are shared out).
    """
    library = sys.modules.get("torch_npu")  # imported by the device's own start, and nowhere else
    kernel = getattr(library, "npu_mm_all_reduce_base", None)
    if kernel is None or parallel.sequence or parallel.axis.group is None or x_BSF.device.type == "cpu":
        return None
    name = parallel.axis.group._get_backend(x_BSF.device).get_hccl_comm_name(dist.get_rank())
    total: Tensor = kernel(x_BSF.flatten(0, -2), weight_MF.t(), name, reduce_op="sum", comm_turn=0)
    return total.view(*x_BSF.shape[:-1], weight_MF.shape[0])

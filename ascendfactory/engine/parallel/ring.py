"""Ring attention: keys and values travel round the ring while each device computes on those that have just come.

Liu et al. 2023, arXiv:2310.01889. Only keys that someone further on needs travel, and only as far as the last who does. Gradients of
keys and values go straight back to their owner. The next block is on its way while the present one is computed.

Shape letters: T cells of a device, U cells of a block of keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ascendfactory.engine.blocks import Documents, Plan
from ascendfactory.engine.flash import Gradients, Kernel, Known, Sums


@dataclass
class _Message:
    """Something on its way; the tensors live until it has arrived."""

    requests: list[dist.Work]
    received: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        """What has come."""
        for request in self.requests:
            request.wait()
        return self.received


def _exchange(documents: Documents, outgoing_UC: Tensor, to: int, num_incoming: int, source: int) -> _Message:
    """Starts sending a block to a device of the ring and receiving one from another; empty ones are not sent."""
    incoming_UC = outgoing_UC.new_empty(num_incoming, outgoing_UC.shape[1])
    group, operations = documents.ring.group, []
    if len(outgoing_UC):
        operations.append(dist.P2POp(dist.isend, outgoing_UC, group=group, group_peer=to))
    if num_incoming:
        operations.append(dist.P2POp(dist.irecv, incoming_UC, group=group, group_peer=source))
    return _Message(dist.batch_isend_irecv(operations) if operations else [], incoming_UC, outgoing_UC)


def _pack(parts: Sequence[Tensor], ranges: list[tuple[int, int]]) -> Tensor:
    """Keys and values of some cells as one message: [U, K·D of keys + K·D of values]."""
    flat = [part.flatten(1) for part in parts]
    rows = [torch.cat([x[start:stop] for x in flat], dim=1) for start, stop in ranges]
    return torch.cat(rows) if rows else flat[0].new_empty(0, sum(x.shape[1] for x in flat))


def _unpack(message_UC: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undoes `_pack`; views."""
    sizes = [x.shape[1] * x.shape[2] for x in like]
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(message_UC.split(sizes, dim=1), like, strict=True)]


class _Travel:
    """The keys and values that pass by, hop after hop."""

    def __init__(self, documents: Documents, plan: Plan, k_UKD: Tensor, v_UKD: Tensor) -> None:
        self._documents, self._plan, self._like = documents, plan, (k_UKD, v_UKD)
        self._block_UC = _pack(self._like, plan.travelling) if documents.ring.size > 1 else None
        self._message: _Message | None = None

    def send_on(self, hop: int) -> None:
        """Starts the exchange after which the block of the next hop is here."""
        ring, sizes = self._documents.ring, self._plan.sizes
        if hop + 1 < ring.size and self._block_UC is not None:
            onward = sizes[(ring.rank - hop) % ring.size][hop + 1]
            coming = sizes[(ring.rank - hop - 1) % ring.size][hop + 1]
            neighbours = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size
            self._message = _exchange(self._documents, self._block_UC[:onward], neighbours[0], coming, neighbours[1])

    def receive(self) -> list[Tensor]:
        """Keys and values of the next hop, [U, K, D] each."""
        assert self._message is not None
        self._block_UC = self._message.wait()
        return _unpack(self._block_UC, self._like)


def forward(
    kernel: Kernel, q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, documents: Documents, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of this device's queries to all the keys that they see, wherever those are.

    Returns:
        out [T, H, D] in the type of the queries, lse [H, T] in fp32 at least.
    """
    plan, ring = documents.plan(window), documents.ring
    sums = Sums.empty(q_THD, v_UKD.shape[-1], exact=ring.size > 1)
    travel, keys, values = _Travel(documents, plan, k_UKD, v_UKD), k_UKD, v_UKD
    for hop in range(ring.size):
        travel.send_on(hop)
        sums.is_fresh = hop == 0 and (window is None or ring.size == 1)
        kernel.forward(q_THD, keys, values, plan.hops[hop], scale, sums)
        if hop + 1 < ring.size:
            keys, values = travel.receive()
    return sums.out_THD.to(q_THD.dtype), sums.lse_HT


def backward(
    kernel: Kernel,
    q_THD: Tensor,
    k_UKD: Tensor,
    v_UKD: Tensor,
    documents: Documents,
    scale: float,
    window: int | None,
    known: Known,
) -> Gradients:
    """Gradients of this device's queries, keys and values; those of keys that others used come back from them."""
    plan, ring = documents.plan(window), documents.ring
    dtype = q_THD.dtype if plan.is_simple else torch.promote_types(q_THD.dtype, torch.float32)
    own = Gradients(*(torch.zeros_like(x, dtype=dtype) for x in (q_THD, k_UKD, v_UKD)), is_fresh=plan.is_simple)
    travel, keys, values = _Travel(documents, plan, k_UKD, v_UKD), k_UKD, v_UKD
    returning: _Message | None = None
    for hop in range(ring.size):
        travel.send_on(hop)
        if hop == 0:
            kernel.backward(q_THD, keys, values, plan.hops[0], scale, known, own)
        else:
            parts = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (keys, values)]
            kernel.backward(q_THD, keys, values, plan.hops[hop], scale, known, Gradients(own.q_THD, *parts))
            _take_back(own, plan, returning)
            outgoing_UC = torch.cat([part.flatten(1) for part in parts], dim=1).to(k_UKD.dtype)
            owner, user = (ring.rank - hop) % ring.size, (ring.rank + hop) % ring.size
            returning = _exchange(documents, outgoing_UC, owner, plan.sizes[ring.rank][hop], user)
        if hop + 1 < ring.size:
            keys, values = travel.receive()
    _take_back(own, plan, returning)
    return own


def _take_back(own: Gradients, plan: Plan, returning: _Message | None) -> None:
    """Adds what another device found for this device's keys and values."""
    if returning is None:
        return
    parts, at = _unpack(returning.wait(), (own.k_UKD, own.v_UKD)), 0
    for start, stop in plan.travelling:
        stop = min(stop, start + len(parts[0]) - at)
        if start < stop:
            own.k_UKD[start:stop] += parts[0][at : at + stop - start]
            own.v_UKD[start:stop] += parts[1][at : at + stop - start]
        at += stop - start

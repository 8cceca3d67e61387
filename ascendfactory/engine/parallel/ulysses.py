"""Ulysses: for attention, devices exchange parts of the sequence for heads, and back (Jacobs et al. 2023, arXiv:2309.14509).

Shape letters: B rows, S tokens of a row on this device, U devices, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascendfactory.engine.mesh import Axis


class _AllToAll(torch.autograd.Function):
    """Part i of the first dim goes to device i; the parts of all devices come back in their order. Its own inverse, so its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def scatter_heads(tensors: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """All heads of a part of the tokens → a part of the heads of all tokens, in one exchange.

    Args:
        tensors: queries [B, H, S, D], then keys and values [B, K, S, D]. Where U does not divide K, each key/value head is
            repeated until it does, so a head goes only to those who need it.

    Returns:
        [B, H/U, U·S, D], and the same of keys and values with lcm(K, U)/U heads.

    Raises:
        ValueError: U does not divide H.
    """
    size = axis.size
    if tensors[0].shape[1] % size:
        raise ValueError(f"ulysses={size} does not divide the {tensors[0].shape[1]} query heads of a device")
    parts, shapes = [], []
    for x_BHSD in tensors:
        heads = x_BHSD.shape[1]
        if heads % size:
            x_BHSD = x_BHSD.repeat_interleave(size // math.gcd(heads, size), dim=1)
        x_UBShD = x_BHSD.unflatten(1, (size, -1)).permute(1, 0, 3, 2, 4)
        shapes.append(x_UBShD.shape[3:])
        parts.append(x_UBShD.flatten(3))
    received_UBSC = _AllToAll.apply(torch.cat(parts, dim=3), axis.group)
    joined_BSC = received_UBSC.transpose(0, 1).flatten(1, 2)
    split = joined_BSC.split([math.prod(shape) for shape in shapes], dim=2)
    return [part.unflatten(2, shape).transpose(1, 2) for part, shape in zip(split, shapes, strict=True)]


def gather_heads(x_BHSD: Tensor, axis: Axis) -> Tensor:
    """A part of the heads of all tokens → all heads of a part of the tokens.

    Args:
        x_BHSD: [B, H/U, U·S, D].

    Returns:
        [B, H, S, D], stored as [B, S, H, D].
    """
    x_UBShD = x_BHSD.transpose(1, 2).unflatten(1, (axis.size, -1)).transpose(0, 1)
    received_UBShD = _AllToAll.apply(x_UBShD, axis.group)
    return received_UBShD.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)

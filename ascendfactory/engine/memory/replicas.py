"""fp32 numbers in 16-bit halves: exactly, as a bf16 weight and what is left of it; or rounded at random, right on average.

A trained weight in mixed precision is kept twice: in bf16 for computing and in fp32 for updating (6 bytes). The upper half of an
fp32 number is a bf16 number, so the pair (bf16, int16 residual) holds both in 4 bytes. Where FSDP is at work it keeps fp32 shards
only, and the bf16 copy lives no longer than its use; this is for weights that FSDP does not touch.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET_NAN = 0x7FC00000  # its lower half is zero


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 → the nearest bf16 and the residual, so that `join` gives back the very bits.

    Bits are read as an integer n = 65536 · hi + lo. A tie between two bf16 numbers goes up in n (away from zero), not to even:
    n − 65536 · rounded then lies in [−32768, 32767] and fits 16 bits. A number nearer to infinity than to the largest bf16 gives
    a weight of infinity, as rounding does, and comes back as it was. Every NaN becomes the plain one, which rounding leaves alone.

    Args:
        master: fp32, any shape.

    Returns:
        bf16 and int16 of the same shape.
    """
    bits = torch.where(master.isnan(), QUIET_NAN, master.contiguous().view(torch.int32))
    low = (bits << 16) >> 16  # the lower half as a signed number: what is left after rounding half up
    return ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, residual: Tensor) -> Tensor:
    """The fp32 number that `split` took apart.

    Args:
        weight: bf16.
        residual: int16, of the same shape.
    """
    high = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (high + residual.to(torch.int32)).view(torch.float32)


def round_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 → bf16, up or down with the probability that makes the expected value the value itself.

    Stochastic rounding: updates too small to move a bf16 number are not lost on average (Gupta et al. 2015, arXiv:1502.02551).
    A random 16-bit number is added to the half that is cut off. Infinities and NaN stay.

    Args:
        values: fp32, any shape.
        generator: on the device of `values`.
    """
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = values.contiguous().view(torch.int32) + noise
    return torch.where(values.isfinite(), ((bits >> 16) << 16).view(torch.float32), values).to(torch.bfloat16)

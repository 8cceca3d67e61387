"""Halves of fp32 numbers: exact over all exponents; random rounding right on average."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.engine.memory.replicas import join, round_at_random, split


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def all_exponents() -> torch.Tensor:
    """Both signs, every exponent, and the mantissas around ties and ends."""
    mantissas = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000, 0x18000, 0x3F8000, 0x7F7FFF, 0x7F8000, 0x7FFFFF)
    return from_bits([sign << 31 | exponent << 23 | mantissa for sign in (0, 1) for exponent in range(256) for mantissa in mantissas])


def test_every_exponent_comes_back_to_the_bit() -> None:
    numbers = all_exponents()
    weight, residual = split(numbers)
    assert (weight.dtype, residual.dtype) == (torch.bfloat16, torch.int16)
    back, is_nan = join(weight, residual), numbers.isnan()
    assert torch.equal(back[~is_nan].view(torch.int32), numbers[~is_nan].view(torch.int32))
    assert back[is_nan].isnan().all()
    assert weight[is_nan].isnan().all()
    infinite = numbers.isinf()
    assert torch.equal(weight[infinite].float(), numbers[infinite])


def test_the_weight_is_the_nearest_bf16() -> None:
    """Equal to rounding to even, except at ties, where the larger magnitude is taken."""
    numbers = all_exponents()
    numbers = numbers[~numbers.isnan()]
    weight, _ = split(numbers)
    tie = (numbers.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(weight[~tie], numbers[~tie].bfloat16())
    upper = from_bits([((b & 0xFFFFFFFF) + 0x8000) & 0xFFFF0000 for b in numbers[tie].view(torch.int32).tolist()])
    assert torch.equal(weight[tie].float(), upper)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_any_bits_come_back(bits: list[int]) -> None:
    for number, back in zip(bits, join(*split(from_bits(bits))).tolist(), strict=True):
        right = struct.unpack("<f", struct.pack("<I", number))[0]
        assert back == right or (back != back and right != right)


def test_random_rounding_is_right_on_average() -> None:
    """1 + k/16 of the distance to the next bf16 number goes up in k of 16 cases."""
    step = 2.0**-7
    dice = torch.Generator().manual_seed(0)
    for sign in (1, -1):
        for k in (0, 1, 8, 15):
            values = torch.full((20000,), sign * (1 + step * k / 16))
            rounded = round_at_random(values, dice).float()
            assert set(rounded.tolist()) <= {sign * 1.0, sign * (1 + step)}
            assert (rounded.abs() > 1).float().mean().item() == pytest.approx(k / 16, abs=0.02)


def test_random_rounding_leaves_what_is_exact_and_what_is_no_number() -> None:
    exact = all_exponents()
    exact = exact[(exact.view(torch.int32) & 0xFFFF) == 0]
    rounded = round_at_random(exact, torch.Generator().manual_seed(0)).float()
    assert torch.equal(rounded.nan_to_num(7.0, 8.0, 9.0), exact.nan_to_num(7.0, 8.0, 9.0))
    odd = from_bits([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000])
    rounded = round_at_random(odd, torch.Generator().manual_seed(0)).float()
    assert rounded[:2].isnan().all()
    assert rounded[2:].tolist() == [float("inf"), float("-inf")]

"""Attention of documents against dense masked softmax in fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascendfactory.engine.attention import _by_torch, attend
from ascendfactory.engine.blocks import Documents, whole_rows

MODULE = torch.nn.Identity()
LENGTHS = [[7, 1, 12], [5, 9]]  # the second row ends in 6 padded cells
Lengths = list[list[int]]


def rows(lengths: Lengths) -> Documents:
    return whole_rows(lengths, max(map(sum, lengths)))


def draw(lengths: Lengths, heads: int = 4, kv_heads: int = 2, size: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)))
    width = max(map(sum, lengths))
    shapes = [(len(lengths), h, width, size) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, scale: float, window: int | None) -> Tensor:
    """Softmax over a full [S, S] score matrix, every rule written as a mask; [B, S, H, D]."""
    rows, heads, width, _ = q.shape
    document = torch.full((rows, width), -1)
    for row, row_lengths in enumerate(lengths):
        numbers = [number for number, length in enumerate(row_lengths) for _ in range(length)]
        document[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
    at = torch.arange(width)
    visible = (document[:, :, None] == document[:, None, :]) & (at[:, None] >= at[None, :]) & (document >= 0)[:, :, None]
    if window is not None:
        visible &= (at[:, None] - at[None, :] < window)[None]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf).masked_fill(~visible.any(-1)[:, None, :, None], 0.0)
    weights = scores.softmax(-1).masked_fill(~visible[:, None], 0.0)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape).contiguous()
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("window", [None, 1, 4, 12, 50])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_dense_softmax(window: int | None, kv_heads: int) -> None:
    inputs = draw(LENGTHS, kv_heads=kv_heads)
    out, weights = attend(MODULE, *inputs, None, documents=rows(LENGTHS), scaling=0.3, sliding_window=window)
    assert weights is None
    assert out.shape == (2, 20, 4, 8)
    expected = with_gradients(dense(*inputs, LENGTHS, 0.3, window), inputs)
    for mine, right in zip(with_gradients(out, inputs), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=4), min_size=1, max_size=3).filter(lambda rows: any(rows)),
    st.none() | st.integers(1, 8),
)
def test_equals_dense_softmax_for_any_packing(lengths: Lengths, window: int | None) -> None:
    inputs = draw(lengths)
    out, _ = attend(MODULE, *inputs, None, documents=rows(lengths), sliding_window=window)
    expected = with_gradients(dense(*inputs, lengths, 8**-0.5, window), inputs)
    for mine, right in zip(with_gradients(out, inputs), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_device_path_equals_cpu_path(window: int | None, dtype: torch.dtype) -> None:
    inputs = draw(LENGTHS, dtype=dtype)
    out, _ = attend(MODULE, *inputs, None, documents=rows(LENGTHS), sliding_window=window)
    other = _by_torch(*inputs, rows(LENGTHS), 8**-0.5, window, 0.0).transpose(1, 2)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for mine, right in zip(with_gradients(out, inputs), with_gradients(other, inputs), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, right, **tolerance)


def test_padding_is_zero_and_gets_no_gradient() -> None:
    inputs = draw(LENGTHS)
    out, *gradients = with_gradients(attend(MODULE, *inputs, None, documents=rows(LENGTHS))[0], inputs)
    assert not out[1, 14:].any()
    assert all(not gradient[1, :, 14:].any() for gradient in gradients)


def test_other_documents_have_no_influence() -> None:
    inputs = draw(LENGTHS)
    changed = [t.detach().clone() for t in inputs]
    for t in changed:
        t[0, :, :7] = 100.0
        t[1, :, 14:] = torch.nan
    before, after = (attend(MODULE, *qkv, None, documents=rows(LENGTHS))[0] for qkv in (inputs, changed))
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert torch.equal(before[1], after[1])


def test_transposed_inputs_as_the_models_pass_them() -> None:
    inputs = draw(LENGTHS)
    strided = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs]
    for mine, right in zip(
        with_gradients(attend(MODULE, *strided, None, documents=rows(LENGTHS))[0], strided),
        with_gradients(attend(MODULE, *inputs, None, documents=rows(LENGTHS))[0], inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


def test_dropout_drops_that_share() -> None:
    torch.manual_seed(0)
    value = torch.ones(1, 2, 64, 8)
    query = torch.zeros(1, 2, 64, 8)  # all weights equal: a row's sum after dropout is kept / (1 - p) / visible
    out, _ = attend(MODULE, query, query, value, None, documents=whole_rows([[64]], 64), dropout=0.25)
    assert out[:, 32:].mean().item() == pytest.approx(1.0, abs=0.05)
    assert out[:, 32:].std().item() > 0.01


def test_a_mask_is_refused() -> None:
    inputs = draw(LENGTHS)
    with pytest.raises(AssertionError, match="documents"):
        attend(SimpleNamespace(), *inputs, torch.ones(1), documents=rows(LENGTHS))  # type: ignore[arg-type]

"""Kernels of all devices against dense softmax; accelerators' operators are acted by plain arithmetic that follows their documentation."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascendfactory.engine import flash
from ascendfactory.engine.blocks import Documents, Hop, Span, banded_block
from ascendfactory.engine.flash import CPU, CUDA, NPU, PLAIN, Kernel, Known, kernel_for
from ascendfactory.engine.parallel import ring
from tests.engine.test_attention import dense, draw, rows, with_gradients

LENGTHS = [[7, 1, 12], [5, 9]]
TYPES = {"cpu": CPU, "plain": PLAIN, "cuda": CUDA, "npu": NPU}


class Acted:
    """softmax(q·k) per sequence with the last query beside the last key, as flash operators with lengths define it."""

    def __init__(self, q_ends: list[int], k_ends: list[int], left: int, right: int, scale: float) -> None:
        self.scale, self.left, self.right = scale, left, right
        self.q_ranges = list(zip([0, *q_ends], q_ends, strict=False))
        self.k_ranges = list(zip([0, *k_ends], k_ends, strict=False))

    def scores(self, q_NHD: Tensor, k_MHD: Tensor) -> Tensor:
        """Scaled scores [H, N, M] of all sequences at once, -inf where hidden."""
        scores = torch.full((q_NHD.shape[1], len(q_NHD), len(k_MHD)), float("-inf"), dtype=q_NHD.dtype)
        for (a, b), (c, d) in zip(self.q_ranges, self.k_ranges, strict=True):
            distance = torch.arange(d - c)[None, :] - torch.arange(b - a)[:, None] - (d - c - b + a)
            hidden = torch.zeros(b - a, d - c, dtype=torch.bool)
            if self.left >= 0:
                hidden |= distance < -self.left
            if self.right >= 0:
                hidden |= distance > self.right
            scores[:, a:b, c:d] = torch.einsum("nhd,mhd->hnm", q_NHD[a:b], k_MHD[c:d]).mul(self.scale).masked_fill(hidden, float("-inf"))
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = self.scores(q, k)
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v), scores.logsumexp(-1)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        groups = q.shape[1] // k.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (k, v))
        weights = (self.scores(q, key) - lse.unsqueeze(-1)).exp()
        inner = torch.einsum("nhd,mhd->hnm", grad, value) - (grad * out).sum(-1).T.unsqueeze(-1)
        scores = weights * inner * self.scale
        parts = [torch.einsum("hnm,nhd->mhd", scores, q), torch.einsum("hnm,nhd->mhd", weights, grad)]
        return [torch.einsum("hnm,mhd->nhd", scores, key), *(x.unflatten(1, (-1, groups)).sum(2) for x in parts)]


def acted_cuda() -> Any:
    """aten's two flash operators; their arguments are those of the schema of this version of torch."""

    def acted(q_bounds: Tensor, k_bounds: Tensor, longest: tuple[int, int], causal: bool, options: dict[str, Any]) -> Acted:
        assert q_bounds.dtype == k_bounds.dtype == torch.int32
        assert longest == (int(q_bounds.diff().max()), int(k_bounds.diff().max()))
        right = 0 if causal else options["window_size_right"]
        return Acted(q_bounds.tolist()[1:], k_bounds.tolist()[1:], options["window_size_left"], right, options["scale"])

    def forward(q, k, v, q_bounds, k_bounds, max_q, max_k, dropout, causal, debug, **options):  # type: ignore[no-untyped-def]
        assert (dropout, debug) == (0.0, False)
        return *acted(q_bounds, k_bounds, (max_q, max_k), causal, options).forward(q, k, v), None, None, None

    def backward(grad, q, k, v, out, lse, q_bounds, k_bounds, max_q, max_k, dropout, causal, state, unused, **options):  # type: ignore[no-untyped-def]
        assert lse.is_contiguous()
        return acted(q_bounds, k_bounds, (max_q, max_k), causal, options).backward(grad, q, k, v, out, lse)

    for name, function in (("_flash_attention_forward", forward), ("_flash_attention_backward", backward)):
        schema = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments if not a.kwarg_only]
        assert len(schema) == function.__code__.co_argcount
    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


def acted_npu() -> Any:
    """torch_npu's fused attention over packed sequences (layout TND): sparse modes 0, 3 and 4 of its documentation."""

    def acted(options: dict[str, Any], scale: float) -> Acted:
        left, right = {
            0: (-1, -1),
            3: (-1, 0),
            4: (options.get("pre_tockens"), options.get("next_tockens")),
        }[options["sparse_mode"]]
        if options["sparse_mode"]:
            assert torch.equal(options["atten_mask"], torch.ones(2048, 2048).triu(1).bool())
        return Acted(options["actual_seq_qlen"], options["actual_seq_kvlen"], left, right, scale)

    def forward(q, k, v, heads, layout, *, scale, **options):  # type: ignore[no-untyped-def]
        assert (heads, layout) == (q.shape[1], "TND")
        out, lse = acted(options, scale).forward(q, k, v)
        highest = lse.T.unsqueeze(-1).repeat(1, 1, 8) - 1.5
        return out, highest, torch.full_like(highest, 1.5).exp(), None, 0, 0, 0

    def backward(q, k, v, grad, heads, layout, *, softmax_max, softmax_sum, attention_in, scale_value, **options):  # type: ignore[no-untyped-def]
        assert (heads, layout) == (q.shape[1], "TND")
        lse = (softmax_max + softmax_sum.log())[..., 0].T
        return *acted(options, scale_value).backward(grad, q, k, v, attention_in, lse), None

    return SimpleNamespace(npu_fusion_attention=forward, npu_fusion_attention_grad=backward)


class ByKernel(torch.autograd.Function):
    """Attention by one kernel, [B, H, S, D] in and [B, S, H, D] out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, documents: Documents, window: int | None) -> Tensor:
        cells = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out, lse = ring.forward(kernel, *cells, documents, 0.3, window)
        ctx.saved = cells, kernel, documents, window, out, lse
        return out.unflatten(0, (q.shape[0], -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cells, kernel, documents, window, out, lse = ctx.saved
        found = ring.backward(kernel, *cells, documents, 0.3, window, Known(grad.flatten(0, 1), out, lse))
        parts = (x.unflatten(0, (grad.shape[0], -1)).transpose(1, 2) for x in (found.q_THD, found.k_UKD, found.v_UKD))
        return (*parts, None, None, None)


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("name", TYPES)
def test_kernels_equal_dense_softmax(name: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cuda":
        monkeypatch.setattr(flash, "_aten", acted_cuda())
    monkeypatch.setitem(sys.modules, "torch_npu", acted_npu())
    inputs = draw(LENGTHS)
    out = ByKernel.apply(*inputs, TYPES[name], rows(LENGTHS), window)
    expected = with_gradients(dense(*inputs, LENGTHS, 0.3, window), inputs)
    for mine, right in zip(with_gradients(out, inputs), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("offset", [5, 9])
@pytest.mark.parametrize("name", TYPES)
def test_keys_before_the_queries_under_a_window(name: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block as a ring meets it: queries 9 to 13 of a document see keys 0 to 4 (offset 9) or 4 to 8 (offset 5) where not too far."""
    if name == "cuda":
        monkeypatch.setattr(flash, "_aten", acted_cuda())
    monkeypatch.setitem(sys.modules, "torch_npu", acted_npu())
    q, k, v = (x[0].transpose(0, 1)[:5].detach() for x in draw([[5]]))
    block = banded_block(Span((0, 0), 9, 14, 0), Span((0, 0), 9 - offset, 14 - offset, 0), 8)
    assert block is not None
    sums = flash.Sums.empty(q, 8, exact=True)
    TYPES[name].forward(q, k, v, Hop([block]), 0.3, sums)
    distance = torch.arange(5)[:, None] + offset - torch.arange(5)[None, :]
    scores = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) * 0.3
    lse = scores.masked_fill(distance >= 8, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(sums.lse_HT, lse)


def test_choice_of_kernel() -> None:
    def q(device: str, dtype: torch.dtype, size: int) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type=device), dtype=dtype, shape=(4, 2, size))

    assert kernel_for(q("cpu", torch.float32, 7)) is CPU
    assert kernel_for(q("cuda", torch.bfloat16, 128)) is CUDA
    assert kernel_for(q("cuda", torch.float32, 128)) is None
    assert kernel_for(q("cuda", torch.bfloat16, 100)) is None
    assert kernel_for(q("npu", torch.bfloat16, 128)) is NPU
    assert kernel_for(q("npu", torch.float32, 128)) is None


def test_sums_join_by_log_sum_exp() -> None:
    """Two halves of the keys, joined, give the softmax over all of them."""
    generator = torch.Generator().manual_seed(0)
    scores, values = torch.randn(2, 3, 10, generator=generator).double(), torch.randn(10, 2, 4, generator=generator).double()
    sums = flash.Sums.empty(torch.zeros(3, 2, 4, dtype=torch.float64), 4, exact=True)
    sums.is_fresh = False
    for part in (slice(0, 7), slice(7, 10)):
        weights = scores[..., part].softmax(-1)
        sums.add(slice(0, 3), torch.einsum("hnm,mhd->nhd", weights, values[part]), scores[..., part].logsumexp(-1))
    torch.testing.assert_close(sums.out_THD, torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values))
    torch.testing.assert_close(sums.lse_HT, scores.logsumexp(-1))

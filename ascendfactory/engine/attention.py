"""The one attention function: document spans decide who sees whom, whatever the layout.

Shape letters: B rows, H query heads, K key/value heads, S positions of a row, D head size.

Registered with transformers as `ascendfactory`; the models are unmodified and call it after
rotary embedding and q/k norm. It needs no mask tensor: each document is computed by itself,
causally, so the cost is the sum of squares of document lengths, not of the row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "ascendfactory"
_aten = torch.ops.aten

Spans = list[tuple[int, int, int]]  # (row, start, stop) of every document of a micro-batch


def document_spans(lengths: list[list[int]]) -> Spans:
    """Document lengths of each row → (row, start, stop) of each document.

    >>> document_spans([[3, 2], [4]])
    [(0, 0, 3), (0, 3, 5), (1, 0, 4)]
    """
    spans = []
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            spans.append((row, start, start + length))
            start += length
    return spans


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Boolean [length, length]: a query sees itself and the `window - 1` keys before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


class _CpuDocuments(torch.autograd.Function):
    """Flash kernel of the CPU on every document, written into one output without padding or copies.

    The kernel takes fewer K than H heads as they are, and its backward wants only (out, log-sum-exp).
    """

    @staticmethod
    def forward(ctx: Any, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, spans: Spans, scale: float, window: int | None) -> Tensor:
        out_BHSD = _empty_output(q_BHSD)
        log_sums = []
        for row, start, stop in spans:
            at = (slice(row, row + 1), slice(None), slice(start, stop))
            bias = _window_bias(stop - start, window, q_BHSD)
            out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(
                q_BHSD[at], k_BKSD[at], v_BKSD[at], 0.0, bias is None, attn_mask=bias, scale=scale
            )
            out_BHSD[at] = out
            log_sums.append(log_sum)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, out_BHSD, *log_sums)
        ctx.spans, ctx.scale, ctx.window = spans, scale, window
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, k_BKSD, v_BKSD, out_BHSD, *log_sums = ctx.saved_tensors
        grads = [torch.zeros_like(t) for t in (q_BHSD, k_BKSD, v_BKSD)]
        for (row, start, stop), log_sum in zip(ctx.spans, log_sums, strict=True):
            at = (slice(row, row + 1), slice(None), slice(start, stop))
            bias = _window_bias(stop - start, ctx.window, q_BHSD)
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_BHSD[at], q_BHSD[at], k_BKSD[at], v_BKSD[at], out_BHSD[at], log_sum, 0.0, bias is None, attn_mask=bias, scale=ctx.scale
            )
            for grad, part in zip(grads, parts, strict=True):
                grad[at] = part
        return (*grads, None, None, None)


def _window_bias(length: int, window: int | None, like: Tensor) -> Tensor | None:
    if window is None or length <= window:
        return None
    visible = window_mask(length, window, like.device)
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))


def _empty_output(q_BHSD: Tensor) -> Tensor:
    """Zeros in the memory order [B, S, H, D] that the output projection reads, so that nothing is copied for it."""
    rows, heads, length, size = q_BHSD.shape
    return q_BHSD.new_zeros(rows, length, heads, size).transpose(1, 2)


def _any_device_documents(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, spans: Spans, scale: float, window: int | None, dropout: float
) -> Tensor:
    """The same by torch's scaled_dot_product_attention, for every device and for attention dropout.

    Rows are split and joined again, not indexed: the backward of a split is one join, that of an index a pass over the whole.
    """
    out_rows = []
    for row in range(q_BHSD.shape[0]):
        lengths = [stop - start for at, start, stop in spans if at == row]
        padding = q_BHSD.shape[2] - sum(lengths)
        parts = (t[row : row + 1].split([*lengths, padding], dim=2) for t in (q_BHSD, k_BKSD, v_BKSD))
        documents = list(zip(*parts, strict=True))
        out = [_one_document(q, k, v, scale, window, dropout) for q, k, v in documents[:-1]]
        out_rows.append(torch.cat([*out, torch.zeros_like(documents[-1][0])], dim=2))
    return torch.cat(out_rows)


def _one_document(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float, window: int | None, dropout: float) -> Tensor:
    length = q_BHSD.shape[2]
    mask = None if window is None or length <= window else window_mask(length, window, q_BHSD.device)
    return functional.scaled_dot_product_attention(
        q_BHSD, k_BKSD, v_BKSD, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    spans: Spans,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of each row; the signature is transformers'.

    Args:
        query: [B, H, S, D]; key, value: [B, K, S, D], H a multiple of K.
        attention_mask: must be None: the spans say everything.
        spans: the documents (see `document_spans`); positions outside every span give zeros.
        sliding_window: keys a query sees, itself included; None = all before it.

    Returns:
        [B, S, H, D] and None (no attention weights are formed).
    """
    assert attention_mask is None, "masks follow from the spans"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu" and dropout == 0.0:
        out_BHSD = _CpuDocuments.apply(query, key, value, spans, scale, sliding_window)
    else:
        out_BHSD = _any_device_documents(query, key, value, spans, scale, sliding_window, dropout)
    return out_BHSD.transpose(1, 2), None


def register() -> None:
    """Makes `attend` known to transformers under NAME. Models built with it must be called with `spans=`.

    No mask function is registered under NAME, so transformers builds no mask at all.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)

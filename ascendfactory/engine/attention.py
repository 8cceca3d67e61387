"""The one attention function: documents decide who sees whom, whatever the layout.

Shape letters: B rows, H query heads, K key/value heads, S cells of a row on this device, D head size, T = B·S cells.

Registered with transformers as `ascendfactory`; the models are unmodified and call it after
rotary embedding and q/k norm. It needs no mask tensor: each document is computed by itself,
causally, so the cost is the sum of squares of document lengths, not of the row. Where a row is spread over devices,
Ulysses first exchanges tokens for heads, then keys and values travel round the ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ascendfactory.engine.blocks import Block, Documents
from ascendfactory.engine.flash import PLAIN, Known, kernel_for, visible
from ascendfactory.engine.memory.region import keep
from ascendfactory.engine.parallel import ring
from ascendfactory.engine.parallel.ulysses import gather_heads, scatter_heads

NAME = "ascendfactory"


def _cells_first(x_BHSD: Tensor) -> Tensor:
    """[B, H, S, D] → [B·S, H, D]; a view of what the models pass."""
    return x_BHSD.transpose(1, 2).flatten(0, 1)


class _Attention(torch.autograd.Function):
    """Blocks of every document by the device's kernel; only q, k, v, out and the log-sum-exp are kept."""

    @staticmethod
    def forward(ctx: Any, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, documents: Documents, scale: float, window: int | None) -> Tensor:
        q_THD, k_TKD, v_TKD = (_cells_first(x) for x in (q_BHSD, k_BKSD, v_BKSD))
        kernel = kernel_for(q_THD) or PLAIN
        out_THD, lse_HT = keep(ring.forward, kernel, q_THD, k_TKD, v_TKD, documents, scale, window)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT)
        ctx.documents, ctx.scale, ctx.window, ctx.num_rows = documents, scale, window, q_BHSD.shape[0]
        return out_THD.unflatten(0, (ctx.num_rows, -1)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_HT = ctx.saved_tensors
        kernel = kernel_for(q_THD) or PLAIN
        known = Known(_cells_first(grad_BHSD), out_THD, lse_HT)
        found = ring.backward(kernel, q_THD, k_TKD, v_TKD, ctx.documents, ctx.scale, ctx.window, known)
        grads = (x.to(q_THD.dtype).unflatten(0, (ctx.num_rows, -1)).transpose(1, 2) for x in (found.q_THD, found.k_UKD, found.v_UKD))
        return (*grads, None, None, None)


def _by_torch(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, documents: Documents, scale: float, window: int | None, dropout: float
) -> Tensor:
    """The same by torch's scaled_dot_product_attention, on one device: for attention dropout, and where no fused operator fits.

    Cells are split and joined again, not indexed: the backward of a split is one join, that of an index a pass over the whole.
    """
    lengths, documents_at, at = [], [], 0  # documents and the padding between them
    for block in documents.plan(None).hops[0].blocks:
        if block.q_start > at:
            lengths.append(block.q_start - at)
        documents_at.append(len(lengths))
        lengths.append(block.num_queries)
        at = block.q_stop
    lengths.append(documents.num_cells - at)
    parts = list(zip(*(_cells_first(x).split(lengths) for x in (q_BHSD, k_BKSD, v_BKSD)), strict=True))
    outs = [torch.zeros_like(q) for q, _, _ in parts]
    for number in documents_at:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in parts[number])
        outs[number] = _one_document(*heads_first, scale, window, dropout)[0].transpose(0, 1)
    return torch.cat(outs).unflatten(0, (q_BHSD.shape[0], -1)).transpose(1, 2)


def _one_document(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scale: float, window: int | None, dropout: float) -> Tensor:
    length = q_BHSD.shape[2]
    mask = None if window is None or length <= window else visible(Block(0, length, 0, length, 0, window), q_BHSD.device)
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
    documents: Documents,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of each row; the signature is transformers'.

    Args:
        query: [B, H, S, D]; key, value: [B, K, S, D], H a multiple of K. S is this device's part of the rows.
        attention_mask: must be None: the documents say everything.
        documents: where they lie (`whole_rows`, or `cut` of parallel/context.py); cells outside every document give zeros.
        sliding_window: keys a query sees, itself included; None = all before it.

    Returns:
        [B, S, H, D] and None (no attention weights are formed).

    Raises:
        ValueError: dropout inside a ring, or heads that Ulysses cannot share out.
    """
    assert attention_mask is None, "masks follow from the documents"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dropout > 0.0 and documents.ring.size > 1:
        raise ValueError("attention dropout needs ring=1: weights of a row are formed on several devices")
    if documents.ulysses.size > 1:
        query, key, value = scatter_heads((query, key, value), documents.ulysses)
    if dropout > 0.0 or (documents.ring.size == 1 and kernel_for(query) is None):
        out_BHSD = _by_torch(query, key, value, documents, scale, sliding_window, dropout)
    else:
        out_BHSD = _Attention.apply(query, key, value, documents, scale, sliding_window)
    if documents.ulysses.size > 1:
        out_BHSD = gather_heads(out_BHSD, documents.ulysses)
    return out_BHSD.transpose(1, 2), None


def register() -> None:
    """Makes `attend` known to transformers under NAME. Models built with it must be called with `documents=`.

    No mask function is registered under NAME, so transformers builds no mask at all.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)

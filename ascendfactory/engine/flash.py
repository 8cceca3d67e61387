"""Attention kernels: blocks of query-key pairs → outputs with log-sum-exp, and back, by the best operator of the device.

Shape letters: T query cells, U key cells, H query heads, K key/value heads (H a multiple of K), D head size.

Outputs of several blocks that share queries are joined by their log-sum-exp (Rabe & Staats 2021, arXiv:2112.05682):
lse = log(e^a + e^b), out = out_a·e^(a-lse) + out_b·e^(b-lse). Backward of a block needs only the final out and lse
(Dao et al. 2022, arXiv:2205.14135), so each block is worked on alone in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ascendfactory.engine.blocks import Block, Hop, tiles

_aten = torch.ops.aten

STRIP_ROWS = 256  # queries of a strip where masks are tensors
NPU_MASK_SIZE = 2048  # the fused operator takes causal masks of any length as this square


@dataclass
class Sums:
    """Outputs so far: out [T, H, D], lse [H, T] (-inf where nothing was seen yet)."""

    out_THD: Tensor  # noqa: N815
    lse_HT: Tensor  # noqa: N815
    is_fresh: bool = True  # no query has been seen, and none comes twice: plain writes do

    @staticmethod
    def empty(q_THD: Tensor, value_size: int, *, exact: bool) -> Sums:
        """Nothing seen yet.

        Args:
            exact: keep the sum in fp32 whatever the type of the queries.
        """
        tokens, heads, _ = q_THD.shape
        sum_dtype = torch.promote_types(q_THD.dtype, torch.float32)
        out_THD = q_THD.new_zeros(tokens, heads, value_size, dtype=sum_dtype if exact else q_THD.dtype)
        return Sums(out_THD, q_THD.new_full((heads, tokens), float("-inf"), dtype=sum_dtype))

    def add(self, at: slice | Tensor, out_NHD: Tensor, lse_HN: Tensor) -> None:
        """Joins what the queries at these cells saw in a block."""
        if self.is_fresh:
            self.out_THD[at], self.lse_HT[:, at] = out_NHD.to(self.out_THD.dtype), lse_HN
            return
        old_HN, lse_HN = self.lse_HT[:, at], lse_HN.to(self.lse_HT.dtype)
        new_HN = torch.logaddexp(old_HN, lse_HN)
        kept_NH1, added_NH1 = ((part - new_HN).exp_().T.unsqueeze(-1) for part in (old_HN, lse_HN))
        self.out_THD[at] = torch.addcmul(self.out_THD[at] * kept_NH1, out_NHD.to(self.out_THD.dtype), added_NH1)
        self.lse_HT[:, at] = new_HN


@dataclass
class Gradients:
    """Gradients so far, shaped as queries, keys and values; they may be more exact than those."""

    q_THD: Tensor  # noqa: N815
    k_UKD: Tensor  # noqa: N815
    v_UKD: Tensor  # noqa: N815
    is_fresh: bool = False  # every query and key comes once: plain writes do

    def add(self, q_at: slice | Tensor, k_at: slice | Tensor, parts: Sequence[Tensor]) -> None:
        """Adds a block's share."""
        for whole, at, part in zip((self.q_THD, self.k_UKD, self.v_UKD), (q_at, k_at, k_at), parts, strict=True):
            if self.is_fresh:
                whole[at] = part.to(whole.dtype)
            else:
                whole[at] += part.to(whole.dtype)


@dataclass(frozen=True)
class Known:
    """What backward knows of the whole attention: the final out and lse, and the gradient of out."""

    grad_THD: Tensor  # noqa: N815
    out_THD: Tensor  # noqa: N815
    lse_HT: Tensor  # noqa: N815


Forward = Callable[[Tensor, Tensor, Tensor, Hop, float, Sums], None]
Backward = Callable[[Tensor, Tensor, Tensor, Hop, float, Known, Gradients], None]


@dataclass(frozen=True)
class Kernel:
    """forward(q_THD, k_UKD, v_UKD, hop, scale, sums) and backward(q_THD, k_UKD, v_UKD, hop, scale, known, gradients)."""

    forward: Forward
    backward: Backward


def kernel_for(q_THD: Tensor) -> Kernel | None:
    """The fused operator for these queries: by device, and on accelerators only in half precision; None if there is none."""
    kind = q_THD.device.type
    if kind == "cpu":
        return CPU
    is_half = q_THD.dtype in (torch.float16, torch.bfloat16)
    if kind == "cuda" and is_half and q_THD.shape[-1] % 8 == 0 and q_THD.shape[-1] <= 256:
        return CUDA
    return NPU if kind == "npu" and is_half else None


def visible(block: Block, device: torch.device) -> Tensor:
    """Boolean [queries, keys] of a block with an offset."""
    assert block.offset is not None
    distance = torch.arange(block.offset, block.offset + block.num_queries, device=device)[:, None]
    distance = distance - torch.arange(block.num_keys, device=device)[None, :]
    return (distance >= 0) if block.window is None else (distance >= 0) & (distance < block.window)


def _heads_first(x_NHD: Tensor) -> Tensor:
    return x_NHD.transpose(0, 1).unsqueeze(0)


# ---------------------------------------------------------------------------------------------------- CPU: aten's flash operator


class _Biases(dict[tuple[Any, ...], Tensor]):
    """Masks as additive tensors; the inner strips of a window all share one."""

    def of(self, block: Block, like: Tensor) -> Tensor | None:
        """-inf where hidden; None where no mask is needed or the operator has its own."""
        if block.offset is None or block.is_causal:
            return None
        key = (block.num_queries, block.num_keys, block.offset, block.window)
        if key not in self:
            hidden = ~visible(block, like.device)
            self[key] = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
        return self[key]


def _strips(blocks: list[Block]) -> Iterator[Block]:
    for block in blocks:
        if block.offset is None or block.is_causal:
            yield block
        else:
            yield from tiles(block, STRIP_ROWS)


def _cpu_forward(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, hop: Hop, scale: float, sums: Sums) -> None:
    # views are made outside the loop: with many short documents Python's time per view counts
    q_1HTD, k_1KUD, v_1KUD, out_1HTD = map(_heads_first, (q_THD, k_UKD, v_UKD, sums.out_THD))
    biases = _Biases()
    for block in _strips(hop.blocks):
        q, rows, k, columns = block.q_start, block.num_queries, block.k_start, block.num_keys
        qkv = q_1HTD.narrow(2, q, rows), k_1KUD.narrow(2, k, columns), v_1KUD.narrow(2, k, columns)
        bias = biases.of(block, q_THD)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, block.is_causal, attn_mask=bias, scale=scale)
        if sums.is_fresh:
            out_1HTD.narrow(2, q, rows).copy_(out)
            sums.lse_HT.narrow(1, q, rows).copy_(lse[0])
        else:
            sums.add(slice(q, q + rows), out[0].transpose(0, 1), lse[0])


def _cpu_backward(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, hop: Hop, scale: float, known: Known, gradients: Gradients) -> None:
    grad_1HTD, q_1HTD, k_1KUD, v_1KUD, out_1HTD = map(_heads_first, (known.grad_THD, q_THD, k_UKD, v_UKD, known.out_THD))
    targets = [_heads_first(x) for x in (gradients.q_THD, gradients.k_UKD, gradients.v_UKD)]
    lse_1HT, biases = known.lse_HT.unsqueeze(0), _Biases()
    for block in _strips(hop.blocks):
        q, rows, k, columns = block.q_start, block.num_queries, block.k_start, block.num_keys
        grad, queries, out = (x.narrow(2, q, rows) for x in (grad_1HTD, q_1HTD, out_1HTD))
        keys, values = k_1KUD.narrow(2, k, columns), v_1KUD.narrow(2, k, columns)
        bias, lse = biases.of(block, q_THD), lse_1HT.narrow(2, q, rows)
        parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, queries, keys, values, out, lse, 0.0, block.is_causal, attn_mask=bias, scale=scale
        )
        for target, part, start, length in zip(targets, parts, (q, k, k), (rows, columns, columns), strict=True):
            if gradients.is_fresh:
                target.narrow(2, start, length).copy_(part)
            else:
                target.narrow(2, start, length).add_(part)


CPU = Kernel(_cpu_forward, _cpu_backward)


# ---------------------------------------------------------------------------------------------------- any device: plain arithmetic


def _plain_scores(q_NHD: Tensor, k_MKD: Tensor, block: Block, scale: float) -> Tensor:
    """Scaled scores [K, H/K, N, M] in fp32, -inf where hidden."""
    exact = torch.promote_types(q_NHD.dtype, torch.float32)
    q_NKGD = q_NHD.to(exact).unflatten(1, (k_MKD.shape[1], -1))
    scores = torch.einsum("nkgd,mkd->kgnm", q_NKGD, k_MKD.to(exact)) * scale
    return scores if block.offset is None else scores.masked_fill_(~visible(block, scores.device), float("-inf"))


def _plain_forward(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, hop: Hop, scale: float, sums: Sums) -> None:
    for block in (strip for whole in hop.blocks for strip in tiles(whole, STRIP_ROWS)):
        q_at, k_at = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        scores_KGNM = _plain_scores(q_THD[q_at], k_UKD[k_at], block, scale)
        lse_KGN = scores_KGNM.logsumexp(-1)
        weights_KGNM = (scores_KGNM - lse_KGN.unsqueeze(-1)).exp_()
        out = torch.einsum("kgnm,mkd->nkgd", weights_KGNM, v_UKD[k_at].to(weights_KGNM.dtype))
        sums.add(q_at, out.flatten(1, 2), lse_KGN.flatten(0, 1))


def _plain_backward(q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, hop: Hop, scale: float, known: Known, gradients: Gradients) -> None:
    num_kv = k_UKD.shape[1]
    for block in (strip for whole in hop.blocks for strip in tiles(whole, STRIP_ROWS)):
        q_at, k_at = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        scores_KGNM = _plain_scores(q_THD[q_at], k_UKD[k_at], block, scale)
        exact = scores_KGNM.dtype
        weights_KGNM = (scores_KGNM - known.lse_HT[:, q_at].unflatten(0, (num_kv, -1)).unsqueeze(-1)).exp_()
        q_NKGD, grad_NKGD, out_NKGD = (x[q_at].to(exact).unflatten(1, (num_kv, -1)) for x in (q_THD, known.grad_THD, known.out_THD))
        value_grad = torch.einsum("kgnm,nkgd->mkd", weights_KGNM, grad_NKGD)
        inner_KGN1 = (grad_NKGD * out_NKGD).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        weight_grad_KGNM = torch.einsum("nkgd,mkd->kgnm", grad_NKGD, v_UKD[k_at].to(exact))
        score_grad_KGNM = weights_KGNM * (weight_grad_KGNM - inner_KGN1) * scale
        query_grad = torch.einsum("kgnm,mkd->nkgd", score_grad_KGNM, k_UKD[k_at].to(exact)).flatten(1, 2)
        key_grad = torch.einsum("kgnm,nkgd->mkd", score_grad_KGNM, q_NKGD)
        gradients.add(q_at, k_at, [query_grad, key_grad, value_grad])


PLAIN = Kernel(_plain_forward, _plain_backward)


# ---------------------------------------------------------------------------------------------------- accelerators: many blocks a call


@dataclass
class Wave:
    """Blocks that one call of a fused operator takes: one kind of mask, no query or key twice.

    With the last query beside the last key, a query sees `left` keys before its own place (None: all) and, if `is_causal`, none after.
    """

    blocks: list[Block]
    is_causal: bool
    left: int | None

    @cached_property
    def q_ends(self) -> list[int]:
        """Where the queries of each block end, counted over all of the wave's."""
        return list(accumulate(block.num_queries for block in self.blocks))

    @cached_property
    def k_ends(self) -> list[int]:
        """The same of the keys."""
        return list(accumulate(block.num_keys for block in self.blocks))

    @cached_property
    def q_at(self) -> slice | Tensor:
        """Query cells, in the order of the blocks; an index on the device after `move`."""
        return _cells([(block.q_start, block.q_stop) for block in self.blocks])

    @cached_property
    def k_at(self) -> slice | Tensor:
        """Key cells likewise."""
        return _cells([(block.k_start, block.k_stop) for block in self.blocks])

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Offsets of the blocks among the wave's queries and keys, int32."""
        return torch.tensor([0, *self.q_ends], dtype=torch.int32), torch.tensor([0, *self.k_ends], dtype=torch.int32)

    def move(self, device: torch.device) -> Wave:
        """The same with its tensors on a device."""
        self.bounds = (self.bounds[0].to(device), self.bounds[1].to(device))
        self.q_at, self.k_at = (at if isinstance(at, slice) else at.to(device) for at in (self.q_at, self.k_at))
        return self


def _cells(ranges: list[tuple[int, int]]) -> slice | Tensor:
    if all(before[1] == after[0] for before, after in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def waves(blocks: list[Block]) -> list[Wave]:
    """Groups blocks for fused operators."""
    found: list[Wave] = []
    for block in blocks:
        is_causal, left = block.offset == 0, None
        if block.offset is not None and block.window is not None:
            left = block.num_keys - block.num_queries - block.offset + block.window - 1
        for wave in found:
            last = wave.blocks[-1]
            follows = last.q_stop <= block.q_start and last.k_stop <= block.k_start
            if (wave.is_causal, wave.left) == (is_causal, left) and follows:
                wave.blocks.append(block)
                break
        else:
            found.append(Wave([block], is_causal, left))
    return found


def _waves_of(hop: Hop, device: torch.device) -> list[Wave]:
    """The waves of a hop, with their tensors on the device; sent there once for all layers."""
    if "waves" not in hop.derived:
        hop.derived["waves"] = [wave.move(device) for wave in waves(hop.blocks)]
    found: list[Wave] = hop.derived["waves"]
    return found


def _fused_forward(operator: Any, q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, hop: Hop, scale: float, sums: Sums) -> None:
    for wave in _waves_of(hop, q_THD.device):
        q_at, k_at = wave.q_at, wave.k_at
        out_NHD, lse_HN = operator(q_THD[q_at], k_UKD[k_at], v_UKD[k_at], wave, scale)
        sums.add(q_at, out_NHD, lse_HN)


def _fused_backward(
    operator: Any, q_THD: Tensor, k_UKD: Tensor, v_UKD: Tensor, hop: Hop, scale: float, known: Known, gradients: Gradients
) -> None:
    for wave in _waves_of(hop, q_THD.device):
        q_at, k_at = wave.q_at, wave.k_at
        out_NHD, lse_HN = known.out_THD[q_at].contiguous(), known.lse_HT[:, q_at].contiguous()
        grad_NHD = known.grad_THD[q_at].contiguous()
        parts = operator(grad_NHD, q_THD[q_at], k_UKD[k_at], v_UKD[k_at], out_NHD, lse_HN, wave, scale)
        gradients.add(q_at, k_at, parts)


def _cuda_arguments(wave: Wave, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    longest_q, longest_k = max(b.num_queries for b in wave.blocks), max(b.num_keys for b in wave.blocks)
    left = -1 if wave.left is None else wave.left
    keywords = {"scale": scale, "window_size_left": left, "window_size_right": 0 if wave.is_causal else -1}
    return (*wave.bounds, longest_q, longest_k, 0.0, wave.is_causal), keywords


def _cuda_forward(q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, wave: Wave, scale: float) -> tuple[Tensor, Tensor]:
    positional, keywords = _cuda_arguments(wave, scale)
    out_NHD, lse_HN, *_ = _aten._flash_attention_forward(q_NHD, k_MKD, v_MKD, *positional, False, **keywords)
    return out_NHD, lse_HN


def _cuda_backward(
    grad_NHD: Tensor, q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_NHD: Tensor, lse_HN: Tensor, wave: Wave, scale: float
) -> Sequence[Tensor]:
    positional, keywords = _cuda_arguments(wave, scale)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q_NHD.device)  # random state, read only with dropout
    parts: Sequence[Tensor] = _aten._flash_attention_backward(
        grad_NHD, q_NHD, k_MKD, v_MKD, out_NHD, lse_HN, *positional, no_dropout, no_dropout[:0], **keywords
    )
    return parts


CUDA = Kernel(partial(_fused_forward, _cuda_forward), partial(_fused_backward, _cuda_backward))


def _npu_arguments(wave: Wave, device: torch.device) -> dict[str, Any]:
    """Mask and lengths of torch_npu's fused attention; its modes 3 and 4 count from the last query and key, as a wave does."""
    keywords: dict[str, Any] = {"actual_seq_qlen": wave.q_ends, "actual_seq_kvlen": wave.k_ends, "sparse_mode": 0}
    if wave.is_causal or wave.left is not None:
        hidden = torch.ones(NPU_MASK_SIZE, NPU_MASK_SIZE, dtype=torch.bool, device=device).triu_(1)
        keywords |= {"atten_mask": hidden, "sparse_mode": 3}
    if wave.left is not None:
        keywords |= {"sparse_mode": 4, "pre_tockens": wave.left, "next_tockens": 0 if wave.is_causal else 2**31 - 1}
    return keywords


def _npu_forward(q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, wave: Wave, scale: float) -> tuple[Tensor, Tensor]:
    import torch_npu

    q_NHD, k_MKD, v_MKD = (x.contiguous() for x in (q_NHD, k_MKD, v_MKD))
    keywords = _npu_arguments(wave, q_NHD.device)
    out_NHD, highest_NH8, sums_NH8, *_ = torch_npu.npu_fusion_attention(q_NHD, k_MKD, v_MKD, q_NHD.shape[1], "TND", scale=scale, **keywords)
    return out_NHD, (highest_NH8[..., 0] + sums_NH8[..., 0].log()).T


def _npu_backward(
    grad_NHD: Tensor, q_NHD: Tensor, k_MKD: Tensor, v_MKD: Tensor, out_NHD: Tensor, lse_HN: Tensor, wave: Wave, scale: float
) -> Sequence[Tensor]:
    """The operator forms weights as e^(score - max) / sum; with max = lse and sum = 1 these are the final ones."""
    import torch_npu

    q_NHD, k_MKD, v_MKD = (x.contiguous() for x in (q_NHD, k_MKD, v_MKD))
    keywords = _npu_arguments(wave, q_NHD.device)
    lse_NH8 = lse_HN.T.unsqueeze(-1).expand(-1, -1, 8).contiguous()
    keywords |= {"softmax_max": lse_NH8, "softmax_sum": torch.ones_like(lse_NH8), "attention_in": out_NHD, "scale_value": scale}
    return tuple(torch_npu.npu_fusion_attention_grad(q_NHD, k_MKD, v_MKD, grad_NHD, q_NHD.shape[1], "TND", **keywords)[:3])


NPU = Kernel(partial(_fused_forward, _npu_forward), partial(_fused_backward, _npu_backward))

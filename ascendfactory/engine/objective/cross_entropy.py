"""Linear cross-entropy in chunks: the logits of the whole batch never exist.

Shape letters: N trained positions, C positions of a chunk, M hidden size, V vocabulary.

The gradients are formed in the forward pass, chunk by chunk, while the chunk's logits are alive,
so the head is multiplied once and one [C, V] block is the peak.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 2**20  # of fp32 logits alive at once; larger gains nothing, smaller starves the GEMM


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        scale: float,
        softcap: float | None,
        logit_scale: float,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_NM = torch.empty_like(hidden_NM) if need_hidden else None
        # fp32 sums: bf16 would lose small contributions of late chunks
        grad_VM = torch.zeros_like(weight_VM, dtype=torch.float32) if need_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias and bias_V is not None else None
        total = hidden_NM.new_zeros((), dtype=torch.float64 if hidden_NM.device.type == "cpu" else torch.float32)
        chunk = max(16, CHUNK_BYTES // (4 * weight_VM.shape[0]))
        for at in range(0, len(labels_N), chunk):
            hidden_CM, labels_C = hidden_NM[at : at + chunk], labels_N[at : at + chunk]
            logits_CV, slope_CV = _logits(hidden_CM, weight_VM, bias_V, softcap, logit_scale)
            log_sum_C = torch.logsumexp(logits_CV, dim=-1)
            target_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
            total += (log_sum_C - target_C).sum(dtype=total.dtype)
            if not (need_hidden or need_weight or need_bias):
                continue
            grad_CV = logits_CV.sub_(log_sum_C[:, None]).exp_()  # softmax, in the logits' memory
            grad_CV.scatter_add_(1, labels_C[:, None], torch.full_like(target_C, -1.0)[:, None])
            grad_CV.mul_(scale) if slope_CV is None else grad_CV.mul_(slope_CV).mul_(scale)
            if grad_V is not None:
                grad_V += grad_CV.sum(0)
            if logit_scale != 1.0:
                grad_CV.mul_(logit_scale)
            grad_CV = grad_CV.to(weight_VM.dtype)
            if grad_NM is not None:
                torch.mm(grad_CV, weight_VM, out=grad_NM[at : at + len(labels_C)])
            if grad_VM is not None:
                if grad_CV.dtype == torch.float32:
                    grad_VM.addmm_(grad_CV.T, hidden_CM)
                else:
                    grad_VM += grad_CV.T @ hidden_CM
        ctx.grads = grad_NM, grad_VM, grad_V
        ctx.weight_dtype = weight_VM.dtype
        return (total * scale).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_NM, grad_VM, grad_V = ctx.grads
        ctx.grads = None
        for part in (grad_NM, grad_VM, grad_V):
            if part is not None:
                part.mul_(grad.to(part.dtype))  # looking whether it is 1 would make an accelerator wait
        cast = [None if g is None else g.to(ctx.weight_dtype) for g in (grad_VM, grad_V)]
        return grad_NM, cast[0], cast[1], None, None, None, None


def _logits(
    hidden_CM: Tensor, weight_VM: Tensor, bias_V: Tensor | None, softcap: float | None, logit_scale: float
) -> tuple[Tensor, Tensor | None]:
    """fp32 logits [C, V], and with a soft cap the slope d(capped)/d(raw)."""
    logits_CV = (hidden_CM @ weight_VM.T).float()
    if logit_scale != 1.0:
        logits_CV.mul_(logit_scale)
    if bias_V is not None:
        logits_CV.add_(bias_V)
    if softcap is None:
        return logits_CV, None
    tanh_CV = logits_CV.div_(softcap).tanh_()
    return tanh_CV * softcap, 1.0 - tanh_CV.square()


def linear_cross_entropy(
    hidden_NM: Tensor,
    weight_VM: Tensor,
    labels_N: Tensor,
    *,
    scale: float,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """scale × Σ_n −log softmax(cap(logit_scale · W h_n + b))[label_n], with cap(x) = softcap · tanh(x / softcap).

    Args:
        hidden_NM: final hidden states at the trained positions, [N, M]; N may be 0.
        weight_VM: the head's weight, [V, M] (the embedding where they are tied).
        labels_N: int64 [N], each in 0..V-1.
        scale: 1 / (trained tokens of the whole step), so that gradients only need summing.

    Returns:
        fp32 scalar.
    """
    if not torch.is_grad_enabled():
        # a Function's needs_input_grad ignores no_grad: evaluation would form every gradient
        hidden_NM, weight_VM, bias_V = hidden_NM.detach(), weight_VM.detach(), None if bias_V is None else bias_V.detach()
    loss: Tensor = _LinearCrossEntropy.apply(hidden_NM, weight_VM, bias_V, labels_N, scale, softcap, logit_scale)
    return loss

"""Linear cross-entropy in chunks: the logits of the whole batch never exist.

Shape letters: N trained positions, C positions of a chunk, M hidden size, V vocabulary.

The gradients are formed in the forward pass, chunk by chunk, while the chunk's logits are alive,
so the head is multiplied once and one [C, V] block is the peak.

Under tensor parallelism each device has the logits of its part of the vocabulary only. One small all-gather a chunk carries each
part's log-sum-exp and the label's logit (2·C numbers a device), from which all devices get the same loss; softmax and
gradients are then local, the hidden states' being one term of a sum over the devices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascendfactory.engine.gradients import Targets
from ascendfactory.engine.mesh import Axis
from ascendfactory.engine.parallel.collectives import interval

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
        axis: Axis,
        vocab_size: int,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_NM = torch.empty_like(hidden_NM) if need_hidden else None
        # fp32 sums: bf16 would lose small contributions of late chunks
        grad_VM = torch.empty_like(weight_VM, dtype=torch.float32) if need_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=torch.float32) if need_bias and bias_V is not None else None
        total = hidden_NM.new_zeros((), dtype=torch.float64 if hidden_NM.device.type == "cpu" else torch.float32)
        chunk = max(16, CHUNK_BYTES // (4 * -(-vocab_size // axis.size)))
        first, _ = interval(vocab_size, axis)
        for at in range(0, len(labels_N), chunk):
            hidden_CM, labels_C = hidden_NM[at : at + chunk], labels_N[at : at + chunk]
            logits_CV, slope_CV = _logits(hidden_CM, weight_VM, bias_V, softcap, logit_scale)
            at_C1, here_C1 = _own_labels(labels_C, first, logits_CV.shape[1])
            target_C = logits_CV.gather(1, at_C1)
            # one pass over the block, in its own memory; what it took off every logit is the log-sum-exp
            torch.log_softmax(logits_CV, dim=-1, out=logits_CV)
            log_sum_C = (target_C - logits_CV.gather(1, at_C1)).squeeze(1)
            target_C = target_C.mul_(here_C1).squeeze(1)
            if axis.size > 1:
                own_log_sum_C = log_sum_C
                log_sum_C, target_C = _join_parts(log_sum_C, target_C, axis)
                logits_CV.add_((own_log_sum_C - log_sum_C)[:, None])
            total += (log_sum_C - target_C).sum(dtype=total.dtype)
            if not (need_hidden or need_weight or need_bias):
                continue
            grad_CV = logits_CV.exp_()
            grad_CV.scatter_add_(1, at_C1, -here_C1)
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            if grad_V is not None:
                grad_V.add_(grad_CV.sum(0), alpha=scale)
            grad_CV = grad_CV.to(weight_VM.dtype)
            # the scale comes with the products: no pass over the block
            if grad_NM is not None:
                part_CM = grad_NM[at : at + len(labels_C)]
                torch.addmm(part_CM, grad_CV, weight_VM, beta=0, alpha=scale * logit_scale, out=part_CM)
            if grad_VM is not None:
                _add_product(grad_VM, grad_CV, hidden_CM, scale * logit_scale, first=at == 0)
        if grad_VM is not None and not len(labels_N):
            grad_VM.zero_()
        ctx.grads, ctx.targets = (grad_NM, grad_VM, grad_V), Targets(weight_VM, bias_V)
        ctx.weight_dtype = weight_VM.dtype
        return (total * scale).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_NM, grad_VM, grad_V = ctx.grads
        ctx.grads = None
        # elsewhere, looking whether it is 1 would make the device wait
        if grad.device.type != "cpu" or float(grad) != 1.0:
            for part in (grad_NM, grad_VM, grad_V):
                if part is not None:
                    part.mul_(grad.to(part.dtype))
        parts = [None if g is None else ctx.targets.whole(i, g.to(ctx.weight_dtype)) for i, g in enumerate((grad_VM, grad_V))]
        return grad_NM, *parts, None, None, None, None, None, None


def _own_labels(labels_C: Tensor, first: int, num: int) -> tuple[Tensor, Tensor]:
    """Where each label stands in this device's part of the vocabulary, and 1.0 or 0.0 for whether it does; both [C, 1]."""
    at_C1 = (labels_C - first)[:, None]
    here_C1 = ((at_C1 >= 0) & (at_C1 < num)).float()
    return at_C1.clamp(0, num - 1), here_C1


def _join_parts(log_sum_C: Tensor, target_C: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """The whole vocabulary's log-sum-exp and the label's logit, from those of the parts: log Σ_r exp(log_sum_r), Σ_r target_r."""
    part_2C = torch.stack((log_sum_C, target_C))
    parts_R2C = part_2C.new_empty(axis.size, *part_2C.shape)
    dist.all_gather_into_tensor(parts_R2C.flatten(0, 1), part_2C, group=axis.group)
    return torch.logsumexp(parts_R2C[:, 0], dim=0), parts_R2C[:, 1].sum(0)


def _add_product(total_VM: Tensor, grad_CV: Tensor, hidden_CM: Tensor, scale: float, *, first: bool) -> None:
    """total (+)= scale · gradᵀ · hidden; the first product is written over what the memory held."""
    if grad_CV.dtype == torch.float32:
        torch.addmm(total_VM, grad_CV.T, hidden_CM, beta=0 if first else 1, alpha=scale, out=total_VM)
        return
    product_VM = grad_CV.T @ hidden_CM
    torch.mul(product_VM, scale, out=total_VM) if first else total_VM.add_(product_VM, alpha=scale)


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
    axis: Axis | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """scale × Σ_n −log softmax(cap(logit_scale · W h_n + b))[label_n], with cap(x) = softcap · tanh(x / softcap).

    Args:
        hidden_NM: final hidden states at the trained positions, [N, M]; N may be 0.
        weight_VM: the head's weight, [V, M] (the embedding where they are tied); under tensor parallelism this device's rows
            of it, `collectives.interval(vocab_size, axis)`.
        labels_N: int64 [N], each in 0..V-1 of the whole vocabulary.
        scale: 1 / (trained tokens of the whole step), so that gradients only need summing.
        axis: the tensor-parallel axis over which the vocabulary is shared out; all its devices give the same hidden states and labels.
        vocab_size: of the whole head; None: the weight has all of it.

    Returns:
        fp32 scalar, the same on all devices of the axis. The gradient of the hidden states is this device's term of a sum.
    """
    if not torch.is_grad_enabled():
        # a Function's needs_input_grad ignores no_grad: evaluation would form every gradient
        hidden_NM, weight_VM, bias_V = hidden_NM.detach(), weight_VM.detach(), None if bias_V is None else bias_V.detach()
    size = weight_VM.shape[0] if vocab_size is None else vocab_size
    loss: Tensor = _LinearCrossEntropy.apply(hidden_NM, weight_VM, bias_V, labels_N, scale, softcap, logit_scale, axis or Axis(), size)
    return loss

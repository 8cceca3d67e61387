"""Leaner forms of what eager models spend their non-matrix time on; same mathematics, fewer passes over memory.

Eager RMSNorm and gated activations read and write the activations a dozen times a step and keep three copies for the
backward pass. These keep the input only and form the rest again. They stand in for the modules' own forward
methods, chosen by class, so a model that has other modules simply keeps them.

Shape letters: T tokens (all leading dims), M hidden size, F feed-forward size.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ascendfactory.engine.gradients import Targets
from ascendfactory.engine.memory.region import is_result_needed
from ascendfactory.engine.parallel.collectives import ALONE, Gathered, Parallel, Pending, join_gathered, start_gather, start_reduce
from ascendfactory.engine.parallel.linear import linear

RMS_NORMS = frozenset(
    {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Glm4RMSNorm", "GlmRMSNorm", "Phi3RMSNorm", "SmolLM3RMSNorm"}
)
GATED_MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "SmolLM3MLP"})  # down(silu(gate(x)) * up(x)), no biases inside


class _RmsNorm(torch.autograd.Function):
    """y = w · x / sqrt(mean(x²) + eps)  (Zhang & Sennrich 2019, arXiv:1910.07467), in fp32 inside.

    dx = r · (w·g − x̂ · mean(w·g·x̂)), dw = Σ g·x̂, with x̂ = r·x and r = 1/sqrt(mean(x²) + eps).
    """

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, weight_M: Tensor, eps: float) -> Tensor:
        x32_TM = x_TM.float()
        scale_T1 = torch.linalg.vector_norm(x32_TM, dim=-1, keepdim=True).square_().div_(x_TM.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TM, weight_M, scale_T1)
        normed_TM = x32_TM * scale_T1
        if x_TM.dtype == torch.float32:
            return normed_TM.mul_(weight_M)
        return normed_TM.to(x_TM.dtype) * weight_M

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TM, weight_M, scale_T1 = ctx.saved_tensors
        size = x_TM.shape[-1]
        normed_TM = x_TM.float() * scale_T1
        grad32_TM = grad_TM.float()
        product_TM = grad32_TM * normed_TM
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product_TM.reshape(-1, size).sum(0).to(weight_M.dtype)
        weight32_M = weight_M.float()
        mean_T1 = (product_TM @ weight32_M).unsqueeze(-1).div_(-size)
        # product's memory takes w·g, then the whole input gradient
        torch.mul(grad32_TM, weight32_M, out=product_TM)
        grad_x = product_TM.addcmul_(normed_TM, mean_T1).mul_(scale_T1)
        return grad_x.to(x_TM.dtype), grad_weight, None


class _GatedMlp(torch.autograd.Function):
    """y = W_d (silu(W_g x) · W_u x)  (Shazeer 2020, arXiv:2002.05202); keeps x, gate and up, and forms the product again.

    Under tensor parallelism F is this device's part; x is gathered and y summed inside, and the backward pass gathers x beside
    y's gradient, and sums x's beside the weights'.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_FM: Tensor, up_FM: Tensor, down_MF: Tensor, parallel: Parallel) -> Tensor:
        whole = join_gathered([p.wait() for p in start_gather(x, parallel, 1)], parallel)
        flat_TM = whole.reshape(-1, whole.shape[-1])
        gate_TF, up_TF = flat_TM @ gate_FM.T, flat_TM @ up_FM.T
        ctx.gathered = not (parallel.sequence and parallel.regather)
        ctx.save_for_backward(whole if ctx.gathered else x, gate_TF, up_TF, gate_FM, up_FM, down_MF)
        ctx.parallel, ctx.targets = parallel, Targets(gate_FM, up_FM, down_MF)
        if not is_result_needed(6):
            return torch.empty_like(x)  # recomputed for those six only, as the last of its layer
        product_TF = torch.nn.functional.silu(gate_TF).mul_(up_TF)
        part = (product_TF @ down_MF.T).view(whole.shape)
        return start_reduce(parallel.chunk(part, 0, 1), parallel).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_TF, up_TF, gate_FM, up_FM, down_MF = ctx.saved_tensors
        need_x, need_gate, need_up, need_down, _ = ctx.needs_input_grad
        parallel, targets = ctx.parallel, ctx.targets
        gathering_grad = start_gather(grad, parallel, 1)
        input_TM = Gathered(x, None if ctx.gathered else parallel)
        if (need_gate and not targets.is_late(0)) or (need_up and not targets.is_late(1)):
            input_TM.start()
        whole_grad = join_gathered([p.wait() for p in gathering_grad], parallel)
        grad_TM = whole_grad.reshape(-1, whole_grad.shape[-1])
        silu_TF = torch.nn.functional.silu(gate_TF)
        grad_down = targets.product(2, grad_TM, Pending(silu_TF * up_TF).wait) if need_down else None
        grad_TF = grad_TM @ down_MF
        grad_up_TF = silu_TF.mul_(grad_TF)
        grad_gate_TF = torch.ops.aten.silu_backward(grad_TF.mul_(up_TF), gate_TF)
        reducing = None
        if need_x:
            dx_TM = torch.addmm(grad_up_TF @ up_FM, grad_gate_TF, gate_FM)
            reducing = start_reduce(parallel.chunk(dx_TM.view(whole_grad.shape), 0, 1), parallel)
        grad_gate = targets.product(0, grad_gate_TF, input_TM.wait) if need_gate else None
        grad_up = targets.product(1, grad_up_TF, input_TM.wait) if need_up else None
        return None if reducing is None else reducing.wait(), grad_gate, grad_up, grad_down, None


class _Embedding(torch.autograd.Function):
    """Rows of a table. Where the table already has a gradient, its rows are added there: no dense gradient beside it."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VM: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.padding, ctx.targets = weight_VM.shape[0], padding, Targets(weight_VM)
        return torch.nn.functional.embedding(ids, weight_VM)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        grad_TM = grad.reshape(-1, grad.shape[-1])
        if ctx.padding >= 0:  # the row of padding learns nothing
            grad_TM = grad_TM.masked_fill((ids == ctx.padding).reshape(-1, 1), 0.0)
        if ctx.targets.rows(0, ids.reshape(-1), grad_TM):
            return None, None, None
        return None, torch.ops.aten.embedding_dense_backward(grad_TM, ids.reshape(-1), ctx.num_rows, -1, False), None


def rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm module's forward. Takes and gives [..., M]."""
    result: Tensor = _RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return result


def gated_mlp(module: Any, x: Tensor) -> Tensor:
    """Gated MLP module's forward. Takes and gives [..., M]; under sequence parallelism [B, S/tp, M]."""
    parallel = getattr(module, "tensor_parallel", ALONE)
    result: Tensor = _GatedMlp.apply(x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight, parallel)
    return result


def embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    """Embedding module's forward. Takes int64 [...], gives [..., M]."""
    result: Tensor = _Embedding.apply(ids, module.weight, -1 if module.padding_idx is None else module.padding_idx)
    return result


def apply_kernels(hf: nn.Module) -> nn.Module:
    """Gives the modules of known classes the lean forward methods. An MLP with adapters or biases keeps its own, its linear modules
    get leaner ones; so does one whose products tensor parallelism cuts in chunks to send one while it multiplies another."""
    for module in hf.modules():
        name = type(module).__name__
        if name in RMS_NORMS:
            module.forward = MethodType(rms_norm, module)
        elif name in GATED_MLPS and _is_plain_gated(module) and getattr(module, "tensor_parallel", ALONE).overlap_chunks == 1:
            module.forward = MethodType(gated_mlp, module)
        elif "forward" in vars(module):  # tensor parallelism's
            continue
        elif type(module) is nn.Linear or _is_plain_lora(module):
            module.forward = MethodType(linear, module)
        elif is_plain_embedding(module):
            module.forward = MethodType(embedding, module)
    return hf


def _is_plain_gated(module: Any) -> bool:
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in layers)
    return plain and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def is_plain_embedding(module: Any) -> bool:
    """Whether `embedding` does what a module does: an nn.Embedding without its rarer options."""
    return type(module) is nn.Embedding and module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _is_plain_lora(module: Any) -> bool:
    """peft's LoRA round an nn.Linear, without DoRA."""
    adapted = "default" in getattr(module, "lora_A", ()) and type(module.base_layer) is nn.Linear
    return adapted and "default" not in module.lora_variant and not module.fan_in_fan_out

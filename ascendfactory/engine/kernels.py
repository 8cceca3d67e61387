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
    """y = W_d (silu(W_g x) · W_u x)  (Shazeer 2020, arXiv:2002.05202); keeps x, gate and up, and forms the product again."""

    @staticmethod
    def forward(ctx: Any, x_TM: Tensor, gate_FM: Tensor, up_FM: Tensor, down_MF: Tensor) -> Tensor:
        flat_TM = x_TM.reshape(-1, x_TM.shape[-1])
        gate_TF, up_TF = flat_TM @ gate_FM.T, flat_TM @ up_FM.T
        ctx.save_for_backward(x_TM, gate_TF, up_TF, gate_FM, up_FM, down_MF)
        product_TF = torch.nn.functional.silu(gate_TF).mul_(up_TF)
        return (product_TF @ down_MF.T).view(x_TM.shape)

    @staticmethod
    def backward(ctx: Any, grad_TM: Tensor) -> tuple[Tensor | None, ...]:
        x_TM, gate_TF, up_TF, gate_FM, up_FM, down_MF = ctx.saved_tensors
        need_x, need_gate, need_up, need_down = ctx.needs_input_grad
        x_TM_flat = x_TM.reshape(-1, x_TM.shape[-1])
        grad_TM_flat = grad_TM.reshape(-1, grad_TM.shape[-1])
        silu_TF = torch.nn.functional.silu(gate_TF)
        grad_down = grad_TM_flat.T @ (silu_TF * up_TF) if need_down else None
        grad_TF = grad_TM_flat @ down_MF
        grad_up_TF = silu_TF.mul_(grad_TF)
        grad_gate_TF = torch.ops.aten.silu_backward(grad_TF.mul_(up_TF), gate_TF)
        grad_gate = grad_gate_TF.T @ x_TM_flat if need_gate else None
        grad_up = grad_up_TF.T @ x_TM_flat if need_up else None
        grad_x = None
        if need_x:
            grad_x = torch.addmm(grad_up_TF @ up_FM, grad_gate_TF, gate_FM).view(x_TM.shape)
        return grad_x, grad_gate, grad_up, grad_down


def rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm module's forward. Takes and gives [..., M]."""
    result: Tensor = _RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return result


def gated_mlp(module: Any, x: Tensor) -> Tensor:
    """Gated MLP module's forward. Takes and gives [..., M]."""
    result: Tensor = _GatedMlp.apply(x, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
    return result


def apply_kernels(hf: nn.Module) -> nn.Module:
    """Gives the modules of known classes the lean forward methods. An MLP with adapters or biases keeps its own."""
    for module in hf.modules():
        name = type(module).__name__
        if name in RMS_NORMS:
            module.forward = MethodType(rms_norm, module)
        elif name in GATED_MLPS and _is_plain_gated(module):
            module.forward = MethodType(gated_mlp, module)
    return hf


def _is_plain_gated(module: Any) -> bool:
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    plain = all(type(layer) is nn.Linear and layer.bias is None for layer in layers)
    return plain and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")

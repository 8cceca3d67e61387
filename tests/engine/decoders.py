"""Tiny decoders with the engine's kernels and attention, for tests of what their layers keep and compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascendfactory.core.recipe import Lora
from ascendfactory.engine import attention
from ascendfactory.engine.adapter import apply_lora
from ascendfactory.engine.blocks import whole_rows
from ascendfactory.engine.kernels import apply_kernels

LENGTHS = [[100, 28], [64, 64]]
TOKENS = 256


def decoder(folder: str, lora: Lora | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Any]]:
    """The model as the engine computes it, with drawn adapters, in training mode; and its layers."""
    from transformers import AutoModelForCausalLM

    attention.register()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    base.config._attn_implementation = attention.NAME
    hf = base
    if lora is not None:
        hf = apply_lora(base, lora)
        adapters = [module for name, module in hf.named_modules() if name.endswith(("lora_A", "lora_B"))]
        for module in adapters:
            module.to_empty(device="cpu").to(dtype)
        generator = torch.Generator().manual_seed(5)
        for parameter in (p for module in adapters for p in module.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    apply_kernels(base)
    return hf.train(), list(base.get_decoder().layers)


def documents() -> dict[str, Any]:
    """The arguments by which the engine's attention learns of LENGTHS."""
    return {"documents": whole_rows(LENGTHS, 128)}


def forward(hf: Any, seed: int = 1) -> Tensor:
    """The mean square of the last hidden states of packed rows of LENGTHS."""
    base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 320, (2, 128), generator=generator)
    positions = torch.tensor([[p for n in row for p in range(n)] for row in LENGTHS])
    hidden: Tensor = base.get_decoder()(
        input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **documents()
    ).last_hidden_state
    return hidden.float().square().mean()


def gradients(hf: Any) -> dict[str, Tensor]:
    """Every trained parameter's gradient, by name."""
    return {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None}


def kept_bytes(hf: Any, loss: Callable[[], Tensor]) -> int:
    """Bytes of distinct storages that are kept when a forward pass ends, parameters and buffers left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    for tensor in [*hf.parameters(), *hf.buffers()]:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return sum(kept.values())

"""The lean norms and MLPs against the modules of transformers that they stand in for."""

from __future__ import annotations

import copy
import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ascendfactory.core.recipe import Lora
from ascendfactory.engine import adapter, model
from ascendfactory.engine.kernels import GATED_MLPS, RMS_NORMS, apply_kernels
from ascendfactory.engine.parallel.linear import merging_pays

HIDDEN = 48


def module_class(name: str) -> Any:
    family = name.removesuffix("RMSNorm").removesuffix("MLP").lower()
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def norm(name: str, dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    built: nn.Module = module_class(name)(HIDDEN, eps=1e-5)
    with torch.no_grad():
        built.weight.add_(torch.randn(HIDDEN, generator=generator) * 0.3)
    return built.to(dtype)


def mlp(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    torch.manual_seed(2)
    config_class = getattr(transformers, name.removesuffix("MLP") + "Config")
    return module_class(name)(config_class(hidden_size=HIDDEN, intermediate_size=80, num_attention_heads=4, hidden_act="silu")).to(dtype)


def run(module: nn.Module, dtype: torch.dtype, *, frozen_input: bool = False) -> list[Tensor | None]:
    """Output, gradient of the input, gradients of the weights, for one fixed input and outer gradient."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(2, 9, HIDDEN, generator=generator) * 3).to(dtype).requires_grad_(not frozen_input)
    outer = torch.randn(2, 9, HIDDEN, generator=generator).to(dtype)
    out = module(x)
    out.backward(outer)
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def assert_same(mine: list[Tensor | None], theirs: list[Tensor | None], exact: list[Tensor | None] | None = None) -> None:
    """Equal in fp32; in bf16 no further from the fp64 result than transformers' own (twice, for luck)."""
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one is None or other is None:
            assert one is other
        elif exact is None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
        else:
            right = exact[number]
            assert right is not None
            assert one.dtype == other.dtype
            mistakes = [((t.double() - right).norm() / right.norm()).item() for t in (one, other)]
            assert mistakes[0] <= 2 * mistakes[1] + 1e-6


@pytest.mark.parametrize("name", sorted(RMS_NORMS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(name: str, dtype: torch.dtype) -> None:
    theirs = norm(name, dtype)
    exact = run(copy.deepcopy(theirs).double(), torch.float64) if dtype == torch.bfloat16 else None
    ours = apply_kernels(copy.deepcopy(theirs))
    assert_same(run(ours, dtype), run(theirs, dtype), exact)


@pytest.mark.parametrize("name", sorted(GATED_MLPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_mlp_equals_transformers(name: str, dtype: torch.dtype) -> None:
    theirs = mlp(name, dtype)
    exact = run(copy.deepcopy(theirs).double(), torch.float64) if dtype == torch.bfloat16 else None
    ours = apply_kernels(copy.deepcopy(theirs))
    assert "forward" in vars(ours)
    assert_same(run(ours, dtype), run(theirs, dtype), exact)


@pytest.mark.parametrize("frozen", [("gate_proj",), ("up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj")])
def test_gated_mlp_with_frozen_weights(frozen: tuple[str, ...]) -> None:
    theirs = mlp("LlamaMLP")
    for name in frozen:
        theirs.get_submodule(name).requires_grad_(False)
    results = run(apply_kernels(copy.deepcopy(theirs)), torch.float32)
    assert_same(results, run(theirs, torch.float32))
    assert [grad is None for grad in results[2:]] == [name in frozen for name in ("gate_proj", "up_proj", "down_proj")]


def test_rms_norm_with_a_frozen_weight_or_input() -> None:
    theirs = norm("LlamaRMSNorm", torch.float32).requires_grad_(False)
    assert_same(run(apply_kernels(copy.deepcopy(theirs)), torch.float32), run(theirs, torch.float32))
    theirs.requires_grad_(True)
    results = run(apply_kernels(copy.deepcopy(theirs)), torch.float32, frozen_input=True)
    assert results[1] is None
    assert_same(results, run(theirs, torch.float32, frozen_input=True))


def test_rms_norm_of_a_tiny_input_is_governed_by_eps() -> None:
    theirs = norm("Qwen3RMSNorm", torch.float32)
    x = torch.full((1, HIDDEN), 1e-6)
    torch.testing.assert_close(apply_kernels(copy.deepcopy(theirs))(x), theirs(x), rtol=1e-6, atol=0)
    assert apply_kernels(copy.deepcopy(theirs))(torch.zeros(1, HIDDEN)).abs().max() == 0


@pytest.mark.parametrize("change", [{"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_mlps_of_another_kind_keep_their_own_forward(change: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    module = module_class("LlamaMLP")(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, **change))
    assert "forward" not in vars(apply_kernels(module))


def test_mlps_with_adapters_keep_their_own_forward(tiny_models: dict[str, str]) -> None:
    hf = model.build_on_meta(model.read_config(tiny_models["qwen3"]))
    adapter.apply_lora(hf, Lora(targets=["q_proj", "down_proj"]))
    apply_kernels(hf)
    lean = {type(module).__name__ for module in hf.modules() if "forward" in vars(module)}
    assert lean == {"Qwen3RMSNorm", "Linear", "Embedding"}  # peft's class is called Linear too


def test_mlps_beside_adapters_are_lean(tiny_models: dict[str, str]) -> None:
    hf = model.build_on_meta(model.read_config(tiny_models["llama"]))
    adapter.apply_lora(hf, Lora(targets=["q_proj"]))
    apply_kernels(hf)
    assert {type(module).__name__ for module in hf.modules() if "forward" in vars(module)} == {
        "LlamaRMSNorm",
        "LlamaMLP",
        "Linear",
        "Embedding",
    }


def test_every_claimed_class_has_the_families_own_layers(tiny_models: dict[str, str]) -> None:
    lean = {}
    for family, folder in tiny_models.items():
        hf = apply_kernels(model.build_on_meta(model.read_config(str(Path(folder)))))
        lean[family] = sorted({type(module).__name__ for module in hf.modules() if "forward" in vars(module)})
    assert lean == {
        "llama": ["Embedding", "Linear", "LlamaMLP", "LlamaRMSNorm"],
        "qwen2": ["Embedding", "Linear", "Qwen2MLP", "Qwen2RMSNorm"],
        "qwen3": ["Embedding", "Linear", "Qwen3MLP", "Qwen3RMSNorm"],
        "glm4": ["Embedding", "Glm4RMSNorm", "Linear"],  # gate and up are one matrix there
        "gemma3": ["Linear"],  # its norm multiplies by 1 + weight, its MLP has a GELU, its embedding a factor
    }


def adapted(num_in: int, num_out: int, dropout: float = 0.0, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> Any:
    """peft's LoRA module with a B that is not zero; base frozen."""
    from peft import LoraConfig
    from peft.tuners.lora.layer import Linear

    torch.manual_seed(4)
    settings = LoraConfig(r=3, lora_alpha=7, lora_dropout=dropout)
    module = Linear(nn.Linear(num_in, num_out, bias=bias), "default", r=3, lora_alpha=7, config=settings)
    nn.init.normal_(module.lora_B["default"].weight)
    module.base_layer.requires_grad_(False)
    return module.to(dtype)


@pytest.mark.parametrize(("num_tokens", "merged"), [(4, False), (40, True)])
@pytest.mark.parametrize("bias", [False, True])
def test_lora_equals_peft_in_both_forms(num_tokens: int, merged: bool, bias: bool) -> None:
    theirs = adapted(12, 20, bias=bias)
    assert merging_pays(num_tokens, theirs.base_layer.weight) is merged  # from 2·12·20 / (12 + 20) = 15 tokens on
    results = []
    for module in (apply_kernels(copy.deepcopy(theirs)), theirs):
        generator = torch.Generator().manual_seed(8)
        x = torch.randn(1, num_tokens, 12, generator=generator, requires_grad=True)
        out = module(x)
        out.backward(torch.randn(out.shape, generator=generator))
        results.append([out.detach(), x.grad, *(p.grad for p in module.parameters())])
    assert_same(*results)


def test_lora_in_bf16_is_never_merged() -> None:
    assert not merging_pays(10**6, torch.empty(12, 20, dtype=torch.bfloat16))


def test_lora_merging_counts_operations() -> None:
    """The rule against a count of what each form costs, for whole steps."""
    for num_in, num_out, tokens in itertools.product((8, 64), (8, 512), (1, 7, 15, 16, 100, 1000)):
        rank = 4
        low = 2 * tokens * rank * (num_in + num_out)  # up-projection forward, its way back to x
        merged = 2 * (2 * rank * num_in * num_out)  # W + BA, formed forward and backward
        assert merging_pays(tokens, torch.empty(num_out, num_in)) == (merged < low)


def test_lora_dropout_scales_what_it_keeps() -> None:
    """One mask for output and gradients: with A the identity and B ones, what is kept can be read from the output."""
    module = adapted(6, 2, dropout=0.5, bias=False)
    with torch.no_grad():
        module.base_layer.weight.zero_()
        module.lora_A["default"].weight.copy_(torch.eye(6)[:3])
        module.lora_B["default"].weight.fill_(1.0)
    lean = apply_kernels(module).train()
    x = torch.ones(1, 4000, 6, requires_grad=True)
    out = lean(x)
    kept = out.detach()[0, :, 0] / (7 / 3) / 2  # of three inputs, each kept one doubled
    assert set(kept.round(decimals=4).tolist()) == {0.0, 1.0, 2.0, 3.0}
    assert kept.mean().item() == pytest.approx(1.5, abs=0.1)
    out[..., 0].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0].sum(1), kept * 2 * 7 / 3)
    torch.testing.assert_close(module.lora_A["default"].weight.grad[0, 0], x.grad[0, :, 0].sum(), rtol=1e-5, atol=0)  # x is one
    assert torch.equal(lean.eval()(x), lean(x))


def test_lora_disabled_is_the_base_alone() -> None:
    module = apply_kernels(adapted(6, 5))
    module.enable_adapters(False)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(module(x), module.base_layer(x))


def test_lora_keeps_one_input_for_base_and_adapter() -> None:
    """What the backward pass keeps is x, W, A, B and x Aᵀ, each once."""
    module = apply_kernels(adapted(12, 20))
    stored: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        stored[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = torch.randn(1, 4, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        module(x)
    assert sorted(stored.values()) == sorted([4 * 12, 20 * 12, 3 * 12, 20 * 3, 4 * 3])

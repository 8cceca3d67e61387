"""Adapters: peft's own modules, filled and read so that peft agrees."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Lora
from ascendfactory.engine import adapter, model
from ascendfactory.engine.mesh import make_mesh
from ascendfactory.engine.parallel.fsdp import apply_fsdp
from tests.pool import Pool

IDS = torch.arange(3, 23)[None]


def adapted(folder: str, lora: Lora) -> Any:
    """A peft model on CPU with transformers' own attention, so that its logits can be compared."""
    hf = model.build_on_meta(model.read_config(folder))
    hf.set_attn_implementation("eager")
    wrapped = adapter.apply_lora(hf, lora)
    model.materialize(wrapped, hf, torch.device("cpu"))
    model.load_weights(hf, folder)
    adapter.draw_adapter(wrapped, 1)
    return wrapped.eval()


def base(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits(hf: Any) -> Tensor:
    return hf(IDS, use_cache=False).logits


@torch.no_grad()
def disturb(wrapped: Any) -> None:
    """As if trained: B and the magnitudes away from their first values."""
    generator = torch.Generator().manual_seed(9)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("family", ["llama", "glm4", "gemma3"])
@pytest.mark.parametrize("dora", [False, True])
def test_first_output_is_that_of_the_base(tiny_models: dict[str, str], family: str, dora: bool) -> None:
    wrapped = adapted(tiny_models[family], Lora(rank=4, dora=dora))
    torch.testing.assert_close(logits(wrapped), logits(base(tiny_models[family])), rtol=1e-4, atol=1e-4)
    trained = {name for name, p in wrapped.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in wrapped.named_parameters() if "lora_" in name}
    assert any("magnitude" in name for name in trained) == dora
    assert not any("lm_head" in name for name in trained)


@pytest.mark.parametrize("settings", [{}, {"rslora": True}, {"dora": True}, {"targets": ["q_proj", "down_proj"], "rank": 3}])
def test_structure_and_first_values_follow_peft(tiny_models: dict[str, str], settings: dict[str, Any]) -> None:
    lora = Lora(**({"rank": 4, "alpha": 6.0, "dropout": 0.1} | settings))
    wrapped = adapted(tiny_models["qwen3"], lora)
    names = settings.get("targets", "all-linear")
    flags = {"use_rslora": lora.rslora, "use_dora": lora.dora}
    peft_config = LoraConfig(r=lora.rank, lora_alpha=6.0, lora_dropout=0.1, target_modules=names, task_type="CAUSAL_LM", **flags)
    theirs = get_peft_model(base(tiny_models["qwen3"]), peft_config)
    expected = dict(theirs.named_parameters())
    mine = dict(wrapped.named_parameters())
    assert {name: (p.shape, p.requires_grad) for name, p in mine.items()} == {n: (p.shape, p.requires_grad) for n, p in expected.items()}
    for one, other in zip(adapter.lora_layers(wrapped), adapter.lora_layers(theirs), strict=True):
        assert one.scaling == other.scaling == {"default": lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)}
    for name, parameter in mine.items():
        if "lora_A" in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            assert bound * 0.8 < parameter.abs().max().item() <= bound
            assert expected[name].abs().max().item() <= bound
        elif "lora_" in name:
            torch.testing.assert_close(parameter, expected[name])


def test_output_and_gradients_equal_those_of_peft(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """The same adapter in a model of peft's own making."""
    for number, settings in enumerate(({}, {"rslora": True}, {"dora": True})):
        wrapped = adapted(tiny_models["llama"], Lora(rank=4, alpha=6.0, **settings))
        disturb(wrapped)
        folder = save(wrapped, tmp_path / str(number))
        theirs = PeftModel.from_pretrained(base(tiny_models["llama"]), folder, is_trainable=True).eval()
        torch.testing.assert_close(logits(wrapped), logits(theirs), rtol=1e-5, atol=1e-5)
        for one in (wrapped, theirs):
            one(IDS, use_cache=False).logits.square().mean().backward()
        right = dict(theirs.named_parameters())
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, right[name].grad, rtol=1e-4, atol=1e-6)


def save(wrapped: Any, folder: Path) -> str:
    """By peft itself."""
    wrapped.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"targets": "v_proj"}])
def test_adapters_written_by_peft_are_read(tiny_models: dict[str, str], tmp_path: Path, settings: dict[str, Any]) -> None:
    lora = Lora.model_validate({"rank": 4, **settings})
    first = adapted(tiny_models["llama"], lora)
    disturb(first)
    folder = save(first, tmp_path / "a")
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert stored.keys() == {adapter.saved_name(name) for name, p in first.named_parameters() if p.requires_grad}
    second = adapted(tiny_models["llama"], lora)
    adapter.load_adapter(second, folder)
    assert torch.equal(logits(second), logits(first))


def test_adapters_that_do_not_fit_are_named(tiny_models: dict[str, str], tmp_path: Path) -> None:
    first = adapted(tiny_models["llama"], Lora(rank=4, targets=["q_proj", "v_proj"]))
    folder = save(first, tmp_path / "a")

    def refused(lora: Lora, where: str, message: str) -> None:
        wrapped = adapted(tiny_models["llama"], lora)
        before = [p.clone() for p in wrapped.parameters()]
        with pytest.raises(UserError, match=message) as caught:
            adapter.load_adapter(wrapped, folder)
        assert caught.value.where == where
        assert all(torch.equal(one, other) for one, other in zip(wrapped.parameters(), before, strict=True))

    right = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    refused(Lora(**right | {"rank": 8}), "tuning.adapter", r"lora_A.weight' is missing, .* or of another shape \(its rank is 4\)")
    refused(Lora(**right | {"targets": ["q_proj"]}), "tuning.adapter", "v_proj.*not asked for")
    refused(Lora(**right | {"targets": ["q_proj", "v_proj", "k_proj"]}), "tuning.adapter", "k_proj.*is missing")
    refused(Lora(**right | {"dora": True}), "tuning.adapter", "lora_magnitude_vector")
    refused(Lora(**right | {"alpha": 8.0}), "tuning.alpha", "write alpha: 16")
    refused(Lora(**right | {"rslora": True}), "tuning.rslora", "write rslora: false")


def test_folders_without_an_adapter(tiny_models: dict[str, str], tmp_path: Path) -> None:
    wrapped = adapted(tiny_models["llama"], Lora(rank=4))
    with pytest.raises(UserError, match="no peft adapter in"):
        adapter.load_adapter(wrapped, str(tmp_path))
    folder = Path(save(wrapped, tmp_path / "a"))
    (folder / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="no peft adapter in"):
        adapter.load_adapter(wrapped, str(folder))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], "no linear layer 'q_prj'; nearest: 'q_proj'; it has down_proj, gate_proj, k_proj"),
        (["xyzzy"], "no linear layer 'xyzzy'; it has"),
        (["q_proj", "lm_head"], "no linear layer 'lm_head'"),
        (["embed_tokens"], "no linear layer 'embed_tokens'"),
        (["layers.7.self_attn.q_proj"], "no linear layer 'layers.7.self_attn.q_proj'"),
    ],
)
def test_targets_that_are_none(tiny_models: dict[str, str], targets: list[str], message: str) -> None:
    hf = model.build_on_meta(model.read_config(tiny_models["llama"]))
    with pytest.raises(UserError, match=message) as caught:
        adapter.apply_lora(hf, Lora(targets=targets))
    assert caught.value.where == "tuning.targets"
    assert targets[-1] in caught.value.zh


def test_a_target_may_name_one_layer(tiny_models: dict[str, str]) -> None:
    hf = model.build_on_meta(model.read_config(tiny_models["llama"]))
    wrapped = adapter.apply_lora(hf, Lora(targets=["layers.1.self_attn.q_proj"]))
    assert [name for name, module in wrapped.named_modules() if module in adapter.lora_layers(wrapped)] == [
        "base_model.model.model.layers.1.self_attn.q_proj"
    ]


def drawn_on_ranks(folder: str, size: int) -> dict[str, Tensor]:
    layout = Layout(dp=size)
    mesh = make_mesh(layout, "cpu", sharded=size > 1)
    hf = model.build_on_meta(model.read_config(folder))
    wrapped = adapter.apply_lora(hf, Lora(rank=3, dora=True))
    if mesh.fsdp is not None:
        apply_fsdp(wrapped, [model.decoder_layers(hf)], mesh.fsdp, layout, torch.float32)
    model.materialize(wrapped, hf, mesh.device)
    model.load_weights(hf, folder)
    adapter.draw_adapter(wrapped, 5)
    whole = {n: p.full_tensor() if size > 1 else p for n, p in wrapped.named_parameters()}
    return {name: tensor.detach() for name, tensor in whole.items() if "lora_" in name}


def test_first_values_do_not_depend_on_the_number_of_ranks(pool: Pool, tiny_models: dict[str, str]) -> None:
    alone = drawn_on_ranks(tiny_models["qwen2"], 1)
    for other in pool.run(drawn_on_ranks, 2, tiny_models["qwen2"], 2):
        assert other.keys() == alone.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in alone.items())


def test_the_file_may_be_half_precision(tiny_models: dict[str, str], tmp_path: Path) -> None:
    first = adapted(tiny_models["llama"], Lora(rank=4))
    disturb(first)
    folder = Path(save(first, tmp_path / "a"))
    shutil.copy(folder / "adapter_config.json", tmp_path / "config.json")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    second = adapted(tiny_models["llama"], Lora(rank=4))
    adapter.load_adapter(second, str(folder))
    for name, parameter in second.named_parameters():
        if "lora_" in name:
            assert torch.equal(parameter, tensors[adapter.saved_name(name)].float())
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4

"""LoRA by peft's own modules: injected on meta, filled so that every layout starts alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.recipe import Lora
from ascendfactory.engine.model import name_seed
from ascendfactory.engine.names import saved_name
from ascendfactory.engine.parallel.pieces import Piece, local, write


def apply_lora(hf: Any, lora: Lora) -> Any:
    """Wraps a meta model with adapters; the base is frozen.

    Raises:
        UserError: a target is no linear layer of the model.
    """
    if lora.targets != ["all-linear"]:
        _check_targets(hf, lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear" if lora.targets == ["all-linear"] else lora.targets,
        use_rslora=lora.rslora,
        use_dora=False,  # peft would compute magnitudes from weights that are not there yet
        task_type="CAUSAL_LM",
    )
    with torch.device("meta"):
        wrapped = get_peft_model(hf, config)
        if lora.dora:
            _add_magnitudes(wrapped, config)
    return wrapped


def _check_targets(hf: Any, targets: list[str]) -> None:
    """The head is no target: the loss multiplies by its weight, so an adapter on it would never be trained."""
    head = hf.get_output_embeddings()
    paths = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear) and module is not head]
    names = sorted({path.rsplit(".", 1)[-1] for path in paths})
    for target in targets:
        if not any(path == target or path.endswith("." + target) for path in paths):
            best = nearest(target, names)
            en_hint, zh_hint = (f"; nearest: {best!r}", f"；最接近的是 {best!r}") if best else ("", "")
            raise UserError(
                "tuning.targets",
                f"the decoder has no linear layer {target!r}{en_hint}; it has {', '.join(names)}",
                f"解码器没有线性层 {target!r}{zh_hint}；可选：{', '.join(names)}",
            )


def _add_magnitudes(wrapped: Any, config: LoraConfig) -> None:
    """DoRA's magnitude vectors as peft stores them, on meta."""
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.lora.variants import DoraLinearVariant

    config.use_dora = True
    for layer in lora_layers(wrapped):
        magnitude = DoraLinearLayer(fan_in_fan_out=False)
        magnitude.weight = nn.Parameter(torch.empty(layer.base_layer.weight.shape[0]))
        layer.lora_magnitude_vector["default"] = magnitude
        layer.lora_variant["default"] = DoraLinearVariant()
        layer.use_dora["default"] = True


def lora_layers(wrapped: Any) -> list[Any]:
    """Every adapted linear layer."""
    return [module for module in wrapped.modules() if hasattr(module, "lora_A") and "default" in module.lora_A]


@torch.no_grad()
def draw_adapter(wrapped: Any, seed: int, pieces: Mapping[str, Piece] = MappingProxyType({})) -> None:
    """peft's initial values, the same under every layout: A uniform (Kaiming, a = √5), B zero, DoRA magnitude = row norms of W.

    Called after the base weights are read.

    Args:
        wrapped: a peft model (under pipeline parallelism: of one chunk), its parameters possibly cut.
        seed: of the run.
        pieces: public name → piece; names that are absent are whole.
    """
    for name, parameter in wrapped.named_parameters():
        if "lora_A" in name:
            piece = pieces.get(saved_name(name))
            shape = piece.shape if piece else parameter.shape
            bound = math.sqrt(1.0 / shape[1])
            generator = torch.Generator().manual_seed(name_seed(seed, name))
            write(parameter, piece, torch.empty(shape).uniform_(-bound, bound, generator=generator))
        elif "lora_B" in name:
            local(parameter).zero_()
    for layer in lora_layers(wrapped):
        if "default" in layer.lora_magnitude_vector:
            weight = layer.base_layer.weight
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            write(layer.lora_magnitude_vector["default"].weight, None, whole.float().norm(dim=1))


@torch.no_grad()
def load_adapter(wrapped: Any, folder: str, pieces: Mapping[str, Piece] = MappingProxyType({}), known: Set[str] | None = None) -> None:
    """Fills the adapter from a folder in peft's format.

    Args:
        wrapped: a peft model (under pipeline parallelism: of one chunk), its parameters possibly cut.
        folder: as `save_pretrained` of peft writes it.
        pieces: public name → piece; names that are absent are whole.
        known: `adapter_names` of the uncut model; None: this model is uncut.

    Raises:
        UserError: no adapter there, or one of another shape, scale or set of targets.
    """
    root = Path(folder)
    file = root / "adapter_model.safetensors"
    if not file.exists() or not (root / "adapter_config.json").exists():
        raise UserError(
            "tuning.adapter",
            f"no peft adapter in {folder!r} (adapter_config.json and adapter_model.safetensors)",
            f"{folder!r} 中没有 peft 适配器（adapter_config.json 与 adapter_model.safetensors）",
        )
    saved = json.loads((root / "adapter_config.json").read_text())
    _check_scale(wrapped.peft_config["default"], saved, folder)
    wanted = {saved_name(name): parameter for name, parameter in wrapped.named_parameters() if "lora_" in name}
    with safe_open(file, framework="pt") as opened:
        stored = set(opened.keys())
        # names first: where one is missing or not asked for, shapes are not looked at
        for key in sorted(stored ^ (wanted.keys() if known is None else known)) or wanted:
            if key not in stored or key not in wanted or opened.get_slice(key).get_shape() != _whole_shape(wanted[key], pieces.get(key)):
                raise UserError(
                    "tuning.adapter",
                    f"{folder} does not fit: {key!r} is missing, not asked for, or of another shape (its rank is {saved['r']}); "
                    "use its rank and targets",
                    f"{folder} 与配置不符：{key!r} 缺失、多余或形状不同（其 rank 为 {saved['r']}）；请使用它的 rank 与 targets",
                )
        for key, parameter in wanted.items():
            write(parameter, pieces.get(key), opened.get_slice(key))


def adapter_names(wrapped: Any) -> set[str]:
    """Every name in this model's adapter file."""
    return {saved_name(name) for name, _ in wrapped.named_parameters() if "lora_" in name}


def _whole_shape(parameter: torch.Tensor, piece: Piece | None) -> list[int]:
    return list(piece.shape if piece else parameter.shape)


def _check_scale(config: LoraConfig, saved: dict[str, Any], folder: str) -> None:
    """The same numbers under another scale would be another adapter."""
    for recipe_key, key in (("alpha", "lora_alpha"), ("rslora", "use_rslora")):
        there, here = saved.get(key, False), getattr(config, key)
        if there != here:
            raise UserError(
                f"tuning.{recipe_key}",
                f"{folder} was trained with {recipe_key} {there}, the recipe says {here}; write {recipe_key}: {str(there).lower()}",
                f"{folder} 训练时的 {recipe_key} 为 {there}，而配方为 {here}；请写 {recipe_key}: {str(there).lower()}",
            )

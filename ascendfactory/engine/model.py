"""Hugging Face models: built on meta, filled from safetensors straight into their shards.

What is used of transformers' internals stands in this file, `attention.py` and `families.py`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ascendfactory.core.messages import UserError
from ascendfactory.engine import attention
from ascendfactory.engine.names import weight_names
from ascendfactory.engine.parallel.pieces import Piece, write


def read_config(folder: str) -> PretrainedConfig:
    """The model's config.json.

    Raises:
        UserError: there is none, or its architecture is unknown to this version of transformers.
    """
    if not (Path(folder) / "config.json").exists():
        raise UserError(
            "model.path",
            f"no config.json in {folder!r}; give a folder as downloaded from the hub",
            f"{folder!r} 中没有 config.json；请给出从模型库下载的文件夹",
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError("model.path", f"{folder}/config.json: {reason}", f"{folder}/config.json 无法识别：{reason}") from error


def build_on_meta(config: PretrainedConfig) -> Any:
    """The unmodified model class of the config, without memory, using our attention function.

    Raises:
        UserError: it is no causal language model, or its attention is one of its own (Falcon's, Gemma 2's with a soft cap).
    """
    attention.register()
    config = copy.deepcopy(config)
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        hf.set_attn_implementation(attention.NAME)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        name = config.model_type
        raise UserError("model.path", f"{name} cannot be trained: {reason}", f"{name} 无法训练：{reason}") from error
    if hf.config._attn_implementation != attention.NAME:
        raise UserError(
            "model.path",
            f"{config.model_type} computes attention by code of its own, so packed documents would see each other; take another model",
            f"{config.model_type} 使用自带的注意力代码，打包的文档会互相可见；请换用其他模型",
        )
    return hf


def decoder_layers(hf: Any) -> list[nn.Module]:
    """The decoder's layers, in order."""
    return list(hf.get_decoder().layers)


def materialize(model: nn.Module, hf: Any, device: torch.device) -> None:
    """Gives a meta model memory on the device, re-ties tied weights and computes its non-persistent buffers.

    `to_empty` leaves rotary frequencies and embedding scales as garbage; transformers' own initialisation of
    each module, run on a copy, has the right values.
    """
    model.to_empty(device=device)
    hf.tie_weights(recompute_mapping=False)
    for module in hf.modules():
        if module._non_persistent_buffers_set:
            filled = _initialised_copy(hf, module, "meta", {})
            for name in module._non_persistent_buffers_set:
                if (buffer := getattr(module, name)) is not None:
                    buffer.copy_(getattr(filled, name))


def _initialised_copy(hf: Any, module: nn.Module, parameters_on: str, shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A copy of one module (its children left out) with the values that transformers gives a new one, buffers on CPU.

    Parameters that are not wanted stay on meta: Gemma's embedding is gigabytes beside its one scale.
    `shapes` holds the whole shapes of parameters that were cut.
    """
    bare = copy.copy(module)
    bare._modules = {}
    bare._parameters = {
        name: None if p is None else nn.Parameter(torch.empty(shapes.get(name, p.shape), dtype=p.dtype, device=parameters_on))
        for name, p in module._parameters.items()
    }
    bare._buffers = {name: None if b is None else torch.empty(b.shape, dtype=b.dtype) for name, b in module._buffers.items()}
    with torch.no_grad():
        hf._init_weights(bare)
    return bare


def name_seed(seed: int, name: str) -> int:
    """A seed for one tensor, so that its random values depend on neither the layout nor the order of creation."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


@torch.no_grad()
def draw_weights(hf: Any, seed: int, pieces: Mapping[str, Piece] = MappingProxyType({})) -> None:
    """Random weights by transformers' own rules, the same under every layout; one module's whole weights are alive at a time.

    Args:
        hf: the materialised model (under pipeline parallelism: of one chunk); parameters may be cut. Adapters are left as they are.
        seed: of the run.
        pieces: name → piece; names that are absent are whole.
    """
    done: set[int] = set()
    for module_name, module in hf.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in done}
        if not own or "lora_" in module_name:
            continue
        public = {name: f"{module_name}.{name}".replace(".base_layer", "") for name in own}
        cuts = {name: pieces.get(public[name]) for name in own}
        shapes = {name: tuple(cut.shape if cut else own[name].shape) for name, cut in cuts.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(name_seed(seed, module_name))
            filled = _initialised_copy(hf, module, "cpu", shapes)
        for name, parameter in own.items():
            write(parameter, cuts[name], getattr(filled, name).detach())
            done.add(id(parameter))


def weight_files(folder: str) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it.

    Raises:
        UserError: no safetensors in the folder, or the index names a file that is missing.
    """
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    if index.exists():
        files = {name: root / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        for file in sorted(set(files.values())):
            if not file.exists():
                raise UserError(
                    "model.path",
                    f"{file.name} is named by {index} but missing; download it again",
                    f"{index} 提到的 {file.name} 不存在；请重新下载",
                )
        return files
    files = {}
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    if not files:
        raise UserError(
            "model.path",
            f"no .safetensors weights in {folder!r}; convert or download them, or set model.init: random",
            f"{folder!r} 中没有 .safetensors 权重；请下载或转换，或设置 model.init: random",
        )
    return files


@torch.no_grad()
def load_weights(
    hf: Any,
    folder: str,
    pieces: Mapping[str, Piece] = MappingProxyType({}),
    known: Set[str] | None = None,
) -> None:
    """Reads every parameter and persistent buffer of the model; each process reads only what it holds.

    Args:
        hf: the materialised model (under pipeline parallelism: of one chunk); parameters may be cut, their names those of
            transformers.
        folder: as downloaded from the hub.
        pieces: name → piece; names that are absent are whole.
        known: `names.weight_names` of the uncut model; None: this model is uncut.

    Raises:
        UserError: a tensor is missing, its shape is not the model's, or the files hold one that the model has no place for.
    """
    files = weight_files(folder)
    prefix = hf.base_model_prefix + "."
    _refuse_unused(hf, folder, set(files), weight_names(hf) if known is None else known)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for name, target in unique_tensors(hf):
            piece = pieces.get(name)
            # folders of bare decoders leave the prefix out
            stored = name if name in files else name.removeprefix(prefix)
            if stored not in files:
                raise UserError("model.path", f"weight {name!r} is in no file of {folder}", f"{folder} 的文件中没有权重 {name!r}")
            if files[stored] not in opened:
                opened[files[stored]] = stack.enter_context(safe_open(files[stored], framework="pt"))
            part = opened[files[stored]].get_slice(stored)
            shape = list(piece.shape if piece else target.shape)
            if list(part.get_shape()) != shape:
                raise UserError(
                    "model.path",
                    f"weight {name!r} has shape {part.get_shape()} in {files[stored].name}, config.json says {shape}",
                    f"权重 {name!r} 在 {files[stored].name} 中形状为 {part.get_shape()}，而 config.json 要求 {shape}",
                )
            write(target, piece, part)


def _refuse_unused(hf: Any, folder: str, stored: set[str], known: Set[str]) -> None:
    """Weights that no one reads mean that config.json is of another model: fewer layers, no biases, another quantisation.

    Tied heads, rotary tables of old exports and what the model class itself ignores do not count.
    """
    places = known | {name.removeprefix(hf.base_model_prefix + ".") for name in known}
    ignored = [re.compile(pattern) for pattern in (*(hf._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$")]
    unused = sorted(name for name in stored - places if not any(pattern.search(name) for pattern in ignored))
    if unused:
        raise UserError(
            "model.path",
            f"{folder} holds {len(unused)} weights that its config.json has no place for, such as {unused[0]!r}; "
            "use the config.json they came with",
            f"{folder} 含有 config.json 中没有位置的 {len(unused)} 个权重，例如 {unused[0]!r}；请使用与权重配套的 config.json",
        )


def unique_tensors(hf: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by transformers' names, a tied weight once, adapters left out."""
    seen: set[int] = set()
    kept = set(hf.state_dict(keep_vars=True))
    for name, tensor in [*hf.named_parameters(), *hf.named_buffers()]:
        if name in kept and id(tensor) not in seen and "lora_" not in name:
            seen.add(id(tensor))
            yield name.replace(".base_layer", ""), tensor

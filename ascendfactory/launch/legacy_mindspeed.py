"""The old files for MindSpeed-LLM, MindSpeed-RL and MindSpeed-MM: preparation, conversions, and Megatron's options."""

from __future__ import annotations

import json
from typing import Any

from ascendfactory.backends import mindspeed_llm, mindspeed_mm
from ascendfactory.backends.common import options as known_options
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.launch.legacy_megatron import put_conversions, put_layout, put_weights
from ascendfactory.launch.legacy_options import MEGATRON, MEGATRON_DEFAULTS, MINDSPEED_RL
from ascendfactory.launch.migration import Migration, Tree, flat, one_of, options_of, required, stop_at_typo

LLM_SECTIONS = ("preprocess_data", "convert_ckpt_hf2mg", "training", "convert_ckpt_mg2hf")
MM_SECTIONS = ("data", "model", "convert_ckpt_hf2mg", "training", "convert_ckpt_mg2hf")
RL_SECTIONS = (
    "preprocess_data",
    "convert_ckpt_hf2mg",
    "megatron_training",
    "actor_config",
    "rl_config",
    "generate_config",
    "convert_ckpt_mg2hf",
)
_TRAINING, _PREPARE = "backend_config.training.", "backend_config.preprocess_data."
_HANDLERS = {  # → stage and format
    "GeneralPretrainHandler": "pretrain text",
    "AlpacaStyleInstructionHandler": "sft alpaca",
    "GeneralInstructionHandler": "sft alpaca",
    "SharegptStyleInstructionHandler": "sft sharegpt",
    "OpenAIInstructionHandler": "sft messages",
    "AlpacaStylePairwiseHandler": "dpo auto",
    "SharegptStylePairwiseHandler": "dpo auto",
}
_MAPPED = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}


def read_mindspeed_llm(sections: Tree, found: Migration, num_devices: int) -> None:
    """Fills the recipe from preparation, conversions and training.

    Raises:
        UserError: an option is unknown or wrong, or weights or raw data are missing.
    """
    given, prepared = options_of(sections, "training"), options_of(sections, "preprocess_data")
    required(given, "tokenizer-name-or-path", _TRAINING)
    options = MEGATRON_DEFAULTS | given
    options.pop("data-path", None)
    stage = _raw_data(prepared, given, found)
    lora = "lora-r" in options
    found.put("tuning", {"kind": "lora" if lora else "full"}, f"{_TRAINING}lora-r")
    packed = stage == "pretrain" or any(group.get(name) for group in (prepared, options) for name in ("pack", "neat-pack"))
    dynamic = [options.pop(name, None) for name in ("variable-seq-lengths", "no-pad-to-seq-lengths")]
    found.put("data.packing", "packed" if packed else "dynamic" if any(dynamic) else "fixed", f"{_PREPARE}pack")
    converted = options_of(sections, "convert_ckpt_hf2mg")
    put_weights(options.pop("load", None), converted.get("save-dir"), f"{_TRAINING}load", found)
    if "convert_ckpt_hf2mg" in sections and sections["convert_ckpt_hf2mg"] is None and not given.get("load"):
        found.put("model.init", "random", "backend_config.convert_ckpt_hf2mg")
        found.note("convert_ckpt_hf2mg: null, and nothing to load: random weights", "convert_ckpt_hf2mg: null 且没有 load：随机初始化")
    put_layout(options, found, _TRAINING)
    put_conversions(sections, found)
    rest = found.apply(options, MEGATRON, _TRAINING)
    found.keep(rest, known_options(f"{mindspeed_llm.NAME}-{mindspeed_llm.PROFILES[0]}"), _TRAINING)


def _raw_data(prepared: Tree, training: Tree, found: Migration) -> str:
    """The raw data and how it is read; returns the stage.

    Raises:
        UserError: only prepared data is named, or the handler is not known.
    """
    known = known_options(f"{mindspeed_llm.NAME}_tools-{mindspeed_llm.PROFILES[0]}")["preprocess_data.py"]
    for name in prepared:
        if name not in known:
            guess = nearest(name, known)
            hint, hint_zh = (f"; did you mean {guess}?", f"；是否为 {guess}？") if guess else ("", "")
            raise UserError(_PREPARE + name, f"no such option{hint}", f"没有此选项{hint_zh}")
    source = prepared.get("input")
    if not source:
        hint, hint_zh = ("write the raw data file there", "请写原始数据文件")
        if training.get("data-path"):
            hint, hint_zh = (
                f"the prepared data of training.data-path cannot be read back; {hint}",
                f"training.data-path 中已处理的数据无法读回；{hint_zh}",
            )
        raise UserError(f"{_PREPARE}input", f"is missing; {hint}", f"缺失；{hint_zh}")
    required(prepared, "handler-name", _PREPARE)
    stage, form = one_of(dict(prepared), "handler-name", _HANDLERS, _PREPARE).split()
    columns = _columns(prepared, stage)
    found.put("data.train", [{"path": str(source), "format": form, **({"columns": columns} if columns else {})}], f"{_PREPARE}input")
    found.put("objective", {"kind": stage}, f"{_PREPARE}handler-name")
    found.dropped += [
        _PREPARE + name for name in prepared if name not in ("input", "handler-name", "map-keys", "json-keys", "pack", "neat-pack")
    ]
    return stage


def _columns(prepared: Tree, stage: str) -> dict[str, str]:
    """Our name of a field → its name in the file, where they differ.

    Raises:
        UserError: map-keys is no JSON object.
    """
    if stage == "pretrain":
        keys = prepared.get("json-keys") or "text"
        first = str(keys[0] if isinstance(keys, list) else keys)
        return {} if first == "text" else {"text": first}
    given = prepared.get("map-keys") or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = None
    if not isinstance(given, dict):
        raise UserError(
            f"{_PREPARE}map-keys", 'is no JSON object, such as {"prompt": "question"}', '不是 JSON 对象，例如 {"prompt": "question"}'
        )
    ours = {_MAPPED.get(str(name), str(name)): str(field) for name, field in given.items() if field and isinstance(field, str)}
    return {name: field for name, field in ours.items() if name != field}


def read_mindspeed_rl(sections: Tree, found: Migration, num_devices: int) -> None:
    """Fills the recipe from preparation, conversion, Megatron's options in two sections, and the algorithm's.

    Raises:
        UserError: an option is misspelt or wrong, or weights or raw data are missing.
    """
    names = ("megatron_training", "actor_config", "preprocess_data", "rl_config", "generate_config")
    training, actor, prepared, rl, generation = (options_of(sections, name) for name in names)
    required(prepared, "input", _PREPARE)
    required(training, "tokenizer_name_or_path", "backend_config.megatron_training.")
    found.put("data.train", [str(prepared["input"])], "backend_config.preprocess_data.input")
    found.put("objective", {"kind": "grpo"})
    converted = options_of(sections, "convert_ckpt_hf2mg")
    put_weights(actor.pop("load", None), converted.get("save_dir"), "backend_config.actor_config.load", found)
    training.pop("data_path", None)
    options = MEGATRON_DEFAULTS | {name.replace("_", "-"): value for name, value in (training | actor).items()}
    places = {
        name.replace("_", "-"): section for section, group in (("megatron_training", training), ("actor_config", actor)) for name in group
    }
    put_layout(options, found, "backend_config.actor_config.")
    megatron = [name.replace("-", "_") for name in MEGATRON]
    for section in ("megatron_training", "actor_config"):
        part = {name: value for name, value in options.items() if places.get(name, "actor_config") == section}
        rest = found.apply(part, MEGATRON, f"backend_config.{section}.")
        left = [name.replace("-", "_") for name in rest]
        stop_at_typo(left, megatron, f"backend_config.{section}.")
        found.dropped += [f"backend_config.{section}.{name}" for name in left]
    put_conversions(sections, found)
    if clip := rl.pop("clip_ratio", None):
        found.put("objective.clip_low", clip, "backend_config.rl_config.clip_ratio")
        found.put("objective.clip_high", clip, "backend_config.rl_config.clip_ratio")
    rest = found.apply(flat({"rl_config": rl, "generate_config": generation}), MINDSPEED_RL, "backend_config.")
    stop_at_typo(rest, (*MINDSPEED_RL, "rl_config.clip_ratio"), "backend_config.")
    found.dropped += [f"backend_config.{name}" for name in rest]


def read_mindspeed_mm(sections: Tree, found: Migration, num_devices: int) -> None:
    """Fills the recipe from the data file's section, the conversion's stages and training.

    Raises:
        UserError: an option is unknown or wrong, or weights or data are missing.
    """
    _multimodal_data(flat(options_of(sections, "data")), found)
    options, converted = MEGATRON_DEFAULTS | options_of(sections, "training"), flat(options_of(sections, "convert_ckpt_hf2mg"))
    put_weights(options.pop("load", None), converted.get("cfg.mm_dir"), f"{_TRAINING}load", found)
    put_layout(options, found, _TRAINING)
    if stages := _stage_layers(converted.get("cfg.parallel_config.llm_pp_layers")):
        found.put("layout.stage_layers", stages, "backend_config.convert_ckpt_hf2mg.cfg.parallel_config.llm_pp_layers")
    put_conversions(sections, found)
    found.dropped += ["backend_config.model"] if sections.get("model") else []
    rest = found.apply(options, MEGATRON, _TRAINING)
    found.keep(rest, known_options(f"{mindspeed_mm.NAME}-{mindspeed_mm.PROFILES[0]}"), _TRAINING)


def _multimodal_data(data: Tree, found: Migration) -> None:
    """The section that MindSpeed-MM reads as data.json."""
    section, prefix = "backend_config.data.", "dataset_param."
    folder, source = f"{prefix}basic_parameters.dataset_dir", f"{prefix}basic_parameters.dataset"
    model = f"{prefix}preprocess_parameters.model_name_or_path"
    found.put("model.path", str(required(data, model, section)), section + model)
    source = str(data.pop(source, None) or required(data, folder, section))
    for name in (model, folder):
        data.pop(name, None)
    sharegpt = data.pop(f"{prefix}attr.messages", "messages") == "conversations"
    found.put(
        "data.train",
        [{"path": source, "format": "sharegpt" if sharegpt else "messages"}],
        f"{section}{prefix}basic_parameters.dataset",
    )
    found.put("objective", {"kind": "sft"})
    if data.pop(f"{prefix}basic_parameters.train_on_prompt", False):
        found.put("objective.train_on", "all", f"{section}{prefix}basic_parameters.train_on_prompt")
    if data.pop(f"{prefix}basic_parameters.mask_history", False):
        found.put("objective.train_on", "last", f"{section}{prefix}basic_parameters.mask_history")
    found.put("data.shuffle", data.pop("dataloader_param.shuffle", True), f"{section}dataloader_param.shuffle")
    switches = [f"{prefix}basic_parameters.{name}" for name in ("train_on_prompt", "mask_history")]
    stop_at_typo(data, (model, folder, *switches, "dataloader_param.shuffle"), section)
    found.dropped += [section + name for name in data]


def _stage_layers(value: Any) -> list[int]:
    """Layers of the language model on each stage; the converter also takes one list a virtual chunk."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return list(value) if isinstance(value, list) and len(value) > 1 and all(isinstance(size, int) for size in value) else []

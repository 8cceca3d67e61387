"""The old file for LLaMA-Factory: one section, `training`, with its own option names."""

from __future__ import annotations

import re

from ascendfactory.backends import llamafactory
from ascendfactory.backends.common import options as known_options
from ascendfactory.launch.legacy_options import LLAMAFACTORY, LLAMAFACTORY_DEFAULTS
from ascendfactory.launch.migration import Migration, Tree, one_of, options_of, required, whole
from ascendfactory.launch.registered import read_info, registered_source

SECTIONS = ("training",)
_TRAINING = "backend_config.training."


def read_llamafactory(sections: Tree, found: Migration, num_devices: int) -> None:
    """Fills the recipe from the section.

    Args:
        num_devices: of all nodes; the file writes sizes of one device.

    Raises:
        UserError: an option is unknown or wrong, or no data set is named.
    """
    options = LLAMAFACTORY_DEFAULTS | options_of(sections, "training")
    required(options, "model_name_or_path", _TRAINING)
    stage = one_of(options, "stage", {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "rm": "reward"}, _TRAINING)
    found.put("objective", {"kind": stage}, f"{_TRAINING}stage")
    tuning = one_of(options, "finetuning_type", {"full": "full", "lora": "lora"}, _TRAINING)
    found.put("tuning", {"kind": tuning}, f"{_TRAINING}finetuning_type")
    whole_answer, last_answer = options.pop("train_on_prompt", False), options.pop("mask_history", False)
    if stage == "sft" and (whole_answer or last_answer):
        found.put("objective.train_on", "all" if whole_answer else "last", f"{_TRAINING}train_on_prompt")
    _sources(options, found)
    packs = [options.pop(name, None) for name in ("packing", "neat_packing")]
    packed = {"pretrain": True, "sft": any(packs)}.get(stage, False)
    found.put("data.packing", "packed" if packed else "dynamic", f"{_TRAINING}packing")
    _rows_a_step(options, found, num_devices)
    _zero(options, found)
    if options.pop("disable_gradient_checkpointing", False):
        found.put("layout.recompute", "none", f"{_TRAINING}disable_gradient_checkpointing")
    if tuning == "lora":
        options.setdefault("lora_alpha", 2 * whole(dict(options), "lora_rank", 8, _TRAINING))
    else:
        options = {name: value for name, value in options.items() if not name.startswith("lora_") or name not in LLAMAFACTORY}
    for strategy, key in (("save_strategy", "checkpoint.every"), ("eval_strategy", "output.eval_every")):
        if options.get(strategy) == "epoch":
            found.put(key, "1 epochs", _TRAINING + strategy)
            options.pop({"save_strategy": "save_steps", "eval_strategy": "eval_steps"}[strategy], None)
    for loser in _outranked(options):
        options.pop(loser)
    if "save_total_limit" not in options:
        found.note("save_total_limit: the 2 newest checkpoints are kept now", "save_total_limit：现在保留最新的 2 个检查点")
    rest = found.apply(options, LLAMAFACTORY, _TRAINING)
    found.keep(rest, known_options(f"{llamafactory.NAME}-{llamafactory.PROFILES[0]}"), _TRAINING)


def _outranked(options: Tree) -> set[str]:
    """Options that mean nothing beside others that are given."""
    losers = {"max_steps": "num_train_epochs", "warmup_steps": "warmup_ratio"}
    return {loser for winner, loser in losers.items() if isinstance(options.get(winner), int) and options[winner] > 0 and loser in options}


def _sources(options: Tree, found: Migration) -> None:
    """Names in dataset_info.json become paths, with the columns that it says."""
    folder = str(options.pop("dataset_dir", None) or "data")
    info = read_info(folder)
    required(options, "dataset", _TRAINING)
    for name, key in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        names = options.pop(name, None) or []
        listed = [str(part).strip() for part in (names if isinstance(names, list) else str(names).split(","))]
        if listed:
            sources = [registered_source(part, folder, info, _TRAINING + name) for part in listed]
            found.put(key, sources, _TRAINING + name)
    if info is None:
        found.note(
            f"data.train: taken as {folder}/<name>.json, no dataset_info.json being there; mend the paths if the files have other names",
            f"data.train：未找到 dataset_info.json，按 {folder}/<名称>.json 处理；文件名不同时请修改路径",
        )


def _rows_a_step(options: Tree, found: Migration, num_devices: int) -> None:
    accumulation = whole(options, "gradient_accumulation_steps", 1, _TRAINING)
    micro = whole(dict(options), "per_device_train_batch_size", 8, _TRAINING)
    found.put("batch.global_size", accumulation * micro * num_devices, f"{_TRAINING}gradient_accumulation_steps")
    found.note(
        f"batch.global_size = {accumulation} x {micro} x {num_devices} devices: the sum over all devices is written now",
        f"batch.global_size = {accumulation} x {micro} x {num_devices} 张卡：现在写全部设备之和",
    )


def _zero(options: Tree, found: Migration) -> None:
    """The stage by the name of the DeepSpeed file; stage 0 (all of it on every device) is left to the planner."""
    name = str(options.pop("deepspeed", None) or "").rsplit("/", 1)[-1]
    if stage := re.search(r"z(?:ero)?_?([123])", name):
        found.put("layout.zero", int(stage[1]), f"{_TRAINING}deepspeed")
    if "offload" in name:
        found.put("layout.offload_optimizer", True, f"{_TRAINING}deepspeed")

"""AscendFactory's YAML of releases 6.5.905 to 6.5.912, as a recipe.

Such a file has three areas: `af_*` keys, `env`, and `backend_config` with the back end's own options. `${...}` refer to other keys,
a section that is null switches a step off, `+key` adds a key. Every option either becomes a recipe key, goes to `extra` under its own
name, is dropped because AscendFactory now decides it (and says so), or is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from ascendfactory.core.messages import UserError, pick
from ascendfactory.launch.legacy_options import LLAMAFACTORY, MEGATRON, VERL, Rule

Tree = dict[str, Any]
_REFERENCE = re.compile(r"\$\{([\w.\-]+)\}")
BACKENDS = {
    "mindspeed-llm": "mindspeed_llm",
    "llamafactory": "llamafactory",
    "verl": "verl",
    "mindspeed-rl": "mindspeed_rl",
    "mindspeed-mm": "mindspeed_mm",
}


@dataclass
class Migration:
    """A recipe as a tree, and what a person should know of how it came about."""

    recipe: Tree
    notes: list[str] = field(default_factory=list)  # what changed, one line each

    def put(self, path: str, value: Any) -> None:
        """Sets a dotted recipe key."""
        *groups, last = path.split(".")
        holder = self.recipe
        for group in groups:
            holder = holder.setdefault(group, {})
        holder[last] = value

    def note(self, en: str, zh: str) -> None:
        """Remembers one line."""
        self.notes.append(pick(en, zh))


def is_legacy(text: str) -> bool:
    """Whether a YAML file is of the old kind."""
    return bool(re.search(r"^(backend_config|af_\w+)\s*:", text, re.MULTILINE))


def read_legacy(text: str, overrides: Sequence[str] = ()) -> Tree:
    """The file with overrides (`--env.NNODES=2`, `--any.key=value`) and references filled in.

    Raises:
        UserError: broken YAML, an unknown reference, or a circle of references.
    """
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise UserError("", f"not YAML: {line}", f"YAML 格式有误：{line}") from None
    if not isinstance(tree, dict):
        raise UserError("", "the file is not a mapping", "文件应为映射")
    for override in overrides:
        path, equals, value = override.removeprefix("--").partition("=")
        if not equals:
            raise UserError(override, "an override is written --key=value", "覆盖项写作 --键=值")
        _set(tree, path.split("."), yaml.safe_load(value))
    resolved: Tree = _resolved(tree, tree, ())
    return resolved


def _set(tree: Tree, keys: list[str], value: Any) -> None:
    *groups, last = keys
    for group in groups:
        inner = tree.get(group)
        if not isinstance(inner, dict):
            inner = tree[group] = {}
        tree = inner
    tree[last] = value


def _resolved(node: Any, root: Tree, seen: tuple[str, ...]) -> Any:
    if isinstance(node, dict):
        return {str(key).removeprefix("+"): _resolved(value, root, seen) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(item, root, seen) for item in node]
    if not isinstance(node, str):
        return node
    whole = _REFERENCE.fullmatch(node)
    if whole:
        return _reference(whole[1], root, seen)
    return _REFERENCE.sub(lambda found: str(_reference(found[1], root, seen)), node)


def _reference(path: str, root: Tree, seen: tuple[str, ...]) -> Any:
    if path in seen:
        circle = " → ".join((*seen, path))
        raise UserError(path, f"the references form a circle: {circle}", f"引用成环：{circle}")
    node: Any = root
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            raise UserError(path, f"${{{path}}} refers to a key that is not there", f"${{{path}}} 引用的键不存在")
        node = node[key]
    return _resolved(node, root, (*seen, path))


def migrate(tree: Tree) -> Migration:
    """The recipe that an old file stands for.

    Raises:
        UserError: the back end cannot be told, or a mandatory value is missing.
    """
    sections = tree.get("backend_config")
    if not isinstance(sections, dict):
        raise UserError("backend_config", "is missing; this is no AscendFactory YAML", "缺失；这不是 AscendFactory 的 YAML")
    name = tree.get("af_backend") or tree.get("backend") or _guess(sections)
    if name not in BACKENDS:
        names = ", ".join(BACKENDS)
        raise UserError("af_backend", f"'{name}' is no back end; write one of {names}", f"'{name}' 不是后端；可写 {names}")
    found = Migration({"backend": BACKENDS[name]})
    model = str(tree.get("af_model_name") or "run")
    found.put("name", re.sub(r"[^\w.\-]", "-", model))
    if tree.get("af_output_dir"):
        found.put("output.dir", str(tree["af_output_dir"]))
    _READERS[name](dict(sections), found)
    _environment(tree.get("env") or {}, found)
    for key in tree:
        if key not in ("backend_config", "env", "af_backend", "backend", "af_model_name", "af_output_dir", "exp_name"):
            found.note(f"{key}: has no meaning now; dropped", f"{key}：已无意义，删去")
    return found


def _guess(sections: Tree) -> str:
    """The back end, by the sections that only it has."""
    if "actor_rollout_ref" in sections:
        return "verl"
    if "megatron_training" in sections:
        return "mindspeed-rl"
    training = sections.get("training") or {}
    if "model_name_or_path" in training:
        return "llamafactory"
    if "data" in sections or "model" in sections:
        return "mindspeed-mm"
    return "mindspeed-llm"


def _environment(env: Tree, found: Migration) -> None:
    """The launch variables: the number of nodes is the recipe's, addresses are the launcher's."""
    nodes = int(env.get("NNODES", 1) or 1)
    found.put("cluster", {"device": "auto", "nodes": nodes})
    for key in ("MASTER_ADDR", "NODE_RANK", "MASTER_PORT"):
        if str(env.get(key, "")) not in ("", "localhost", "0", "127.0.0.1"):
            found.note(f"env.{key}: set the variable {key} when launching", f"env.{key}：启动时设环境变量 {key}")


def _apply(options: Tree, rules: dict[str, Rule], found: Migration, section: str) -> Tree:
    """Moves options that have a recipe key; returns those that have none."""
    rest = {}
    for name, value in options.items():
        if name not in rules:
            rest[name] = value
            continue
        rule = rules[name]
        if rule is None:
            found.note(f"{section}{name}: decided by AscendFactory now; dropped", f"{section}{name}：现由 AscendFactory 决定，删去")
        elif value is not None:
            key, convert = rule if isinstance(rule, tuple) else (rule, None)
            found.put(key, convert(value) if convert else value)
    return rest


def _extra(rest: Tree, found: Migration) -> None:
    given = {name: value for name, value in rest.items() if value is not None}
    if given:
        found.put("extra", given)
        names = ", ".join(given)
        found.note(f"kept under extra, as the back end spells them: {names}", f"按后端写法保留在 extra：{names}")


def _llamafactory(sections: Tree, found: Migration) -> None:
    options = dict(sections.get("training") or {})
    stage = str(options.pop("stage", "sft"))
    kinds = {"pt": "pretrain", "sft": "sft", "dpo": "dpo", "rm": "reward"}
    if stage not in kinds:
        raise UserError(
            "backend_config.training.stage",
            f"'{stage}' is not run by this back end; write pt, sft, dpo or rm",
            f"此后端不支持 '{stage}'；可写 pt、sft、dpo、rm",
        )
    found.put("objective", {"kind": kinds[stage]})
    found.put("tuning", {"kind": "lora" if options.pop("finetuning_type", "full") == "lora" else "full"})
    if options.pop("train_on_prompt", False) and stage == "sft":
        found.put("objective.train_on", "all")
    if options.pop("mask_history", False) and stage == "sft":
        found.put("objective.train_on", "last")
    _registered(options, found)
    accumulation = int(options.pop("gradient_accumulation_steps", 1) or 1)
    micro = int(options.get("per_device_train_batch_size", 1) or 1)
    found.put("batch.global_size", accumulation * micro * 8)
    found.note(
        f"batch.global_size = {accumulation} x {micro} x 8 devices: the sum over all devices is written now",
        f"batch.global_size = {accumulation} x {micro} x 8 张卡：现在写全部设备之和",
    )
    zero = re.search(r"z(?:ero)?_?([123])", str(options.pop("deepspeed", "") or ""))
    if zero:
        found.put("layout.zero", int(zero[1]))
    rest = _apply(options, LLAMAFACTORY, found, "training.")
    if stage in ("dpo", "rm"):
        found.put("data.packing", "dynamic")
    _extra(rest, found)


def _registered(options: Tree, found: Migration) -> None:
    """Names in dataset_info.json become paths."""
    folder = PurePosixPath(str(options.pop("dataset_dir", None) or "data"))
    names = options.pop("dataset", None)
    if not names:
        raise UserError("backend_config.training.dataset", "is missing", "缺失")
    listed = [name.strip() for name in (names if isinstance(names, list) else str(names).split(","))]
    found.put("data.train", [str(folder / f"{name}.json") for name in listed])
    found.note(
        f"data.train: taken as {folder}/<name>.json; no dataset_info.json is needed; mend the paths if the names differ",
        f"data.train：按 {folder}/<名称>.json 处理；不再需要 dataset_info.json，文件名不同时请修改路径",
    )


def _mindspeed_llm(sections: Tree, found: Migration) -> None:
    options, prepared = dict(sections.get("training") or {}), dict(sections.get("preprocess_data") or {})
    source = prepared.get("input") or options.pop("data-path", None)
    if not source:
        raise UserError("backend_config.preprocess_data.input", "is missing; write the raw data", "缺失；请写原始数据")
    if not prepared.get("input"):
        found.note(
            "training.data-path: prepared data cannot be read back; write the raw data in data.train",
            "training.data-path：已处理的数据无法读回；请在 data.train 写原始数据",
        )
    options.pop("data-path", None)
    found.put("data.train", [str(source)])
    handler = str(prepared.get("handler-name", ""))
    pretrain = handler == "GeneralPretrainHandler" or (not handler and options.get("stage") is None)
    found.put("objective", {"kind": "pretrain" if pretrain else "sft"})
    lora = "lora-r" in options
    found.put("tuning", {"kind": "lora" if lora else "full"})
    packed = bool(prepared.get("pack") or prepared.get("neat-pack") or options.get("neat-pack") or pretrain)
    found.put("data.packing", "packed" if packed else "fixed")
    options.pop("variable-seq-lengths", None)
    _context(options, found)
    layers = options.pop("recompute-num-layers", None)
    if layers and options.get("recompute-method") == "block":
        found.put("layout.recompute_layers", int(layers))
    minimum = options.pop("min-lr", None)
    if minimum and options.get("lr"):
        found.put("optim.min_lr_ratio", round(float(minimum) / float(options["lr"]), 6))
    if "convert_ckpt_mg2hf" in sections and sections["convert_ckpt_mg2hf"] is None:
        found.put("output.export", False)
    if sections.get("convert_ckpt_hf2mg"):
        found.note("convert_ckpt_hf2mg: follows the layout now; dropped", "convert_ckpt_hf2mg：现由布局决定，删去")
    rest = _apply(options, MEGATRON, found, "training.")
    found.put("layout.zero", 1)
    _extra(rest, found)


def _context(options: Tree, found: Migration) -> None:
    degree = int(options.pop("context-parallel-size", 1) or 1)
    algorithm = str(options.pop("context-parallel-algo", "megatron_cp_algo"))
    inner = int(options.pop("ulysses-degree-in-cp", 1) or 1)
    if degree > 1:
        ulysses = degree if algorithm == "ulysses_cp_algo" else inner
        found.put("layout.ulysses", ulysses)
        found.put("layout.ring", degree // ulysses)


def _flat(tree: Tree, prefix: str = "") -> Tree:
    flat: Tree = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _verl(sections: Tree, found: Migration) -> None:
    flat = _flat(sections)
    estimator = flat.pop("algorithm.adv_estimator", "grpo")
    groups = flat.pop("algorithm.filter_groups.enable", False)
    found.put("objective", {"kind": "ppo" if estimator == "gae" else "dapo" if groups else "grpo"})
    found.put("tuning", {"kind": "lora" if int(flat.get("actor_rollout_ref.model.lora_rank") or 0) > 0 else "full"})
    if not int(flat.get("actor_rollout_ref.model.lora_rank") or 0):
        flat.pop("actor_rollout_ref.model.lora_rank", None)
        flat.pop("actor_rollout_ref.model.lora_alpha", None)
    prompt, answer = int(flat.get("data.max_prompt_length") or 1024), int(flat.get("data.max_response_length") or 1024)
    found.put("data.seq_len", prompt + answer)
    found.put("optim.schedule", "constant")
    found.put("optim.warmup", 0.0)
    found.note(
        f"data.seq_len = {prompt} + {answer}: a quarter of it is the prompt's now",
        f"data.seq_len = {prompt} + {answer}：其中四分之一留给提示",
    )
    _extra(_apply(flat, VERL, found, ""), found)


def _mindspeed_rl(sections: Tree, found: Migration) -> None:
    training, actor = dict(sections.get("megatron_training") or {}), dict(sections.get("actor_config") or {})
    prepared = dict(sections.get("preprocess_data") or {})
    source = prepared.get("input") or training.get("data_path")
    if not source:
        raise UserError("backend_config.preprocess_data.input", "is missing", "缺失")
    found.put("data.train", [str(source)])
    found.put("objective", {"kind": "grpo"})
    renamed = {key.replace("_", "-"): value for key, value in {**training, **actor}.items() if key not in ("data_path", "model", "min_lr")}
    rest = _apply(renamed, MEGATRON, found, "")
    found.put("layout.zero", 1)
    found.put("optim.schedule", str(actor.get("lr_decay_style", "constant")))
    dropped = [*rest, *(f"{name}.*" for name in ("rl_config", "generate_config") if sections.get(name))]
    if dropped:
        names = ", ".join(dropped)
        found.note(f"set by AscendFactory for this frozen back end; dropped: {names}", f"该冻结后端由 AscendFactory 设定，删去：{names}")


def _mindspeed_mm(sections: Tree, found: Migration) -> None:
    data = _flat(sections.get("data") or {})
    path = data.get("dataset_param.preprocess_parameters.model_name_or_path")
    source = data.get("dataset_param.basic_parameters.dataset") or data.get("dataset_param.basic_parameters.dataset_dir")
    if not path or not source:
        key = "backend_config.data.dataset_param"
        raise UserError(
            key, "needs preprocess_parameters.model_name_or_path and basic_parameters.dataset", "需要 model_name_or_path 与 dataset"
        )
    found.put("model.path", str(path))
    found.put("data.train", [str(source)])
    found.put("objective", {"kind": "sft"})
    options = dict(sections.get("training") or {})
    _context(options, found)
    rest = _apply(options, MEGATRON, found, "training.")
    found.put("layout.zero", 1)
    if "convert_ckpt_mg2hf" in sections and sections["convert_ckpt_mg2hf"] is None:
        found.put("output.export", False)
    found.note("stages of both converters follow model.json, which follows the layout; dropped", "转换与模型的各级层数由布局统一决定，删去")
    _extra({name: value for name, value in rest.items() if name not in ("mm-data", "mm-model", "mm-tool")}, found)


_READERS: dict[str, Callable[[Tree, Migration], None]] = {
    "llamafactory": _llamafactory,
    "mindspeed-llm": _mindspeed_llm,
    "verl": _verl,
    "mindspeed-rl": _mindspeed_rl,
    "mindspeed-mm": _mindspeed_mm,
}

"""AscendFactory's YAML of releases 6.5.905 to 6.5.912, as a recipe.

Such a file has three areas: `af_*` keys, `env`, and `backend_config` with the back end's own options. `${...}` refer to other keys,
a section that is null switches a step off, `+key` adds a key. Every option either becomes a recipe key, goes to `extra` under its own
name, is dropped because AscendFactory now decides it (and says so), or is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascendfactory.core.load import parse_yaml
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.recipe import ClusterSpec
from ascendfactory.launch import legacy_llamafactory, legacy_mindspeed, legacy_verl
from ascendfactory.launch.devices import detect
from ascendfactory.launch.migration import Migration, Tree, flat, mapping, whole

READERS: dict[str, tuple[tuple[str, ...], Callable[[Tree, Migration, int], None]]] = {  # sections of backend_config, and who reads them
    "mindspeed-llm": (legacy_mindspeed.LLM_SECTIONS, legacy_mindspeed.read_mindspeed_llm),
    "llamafactory": (legacy_llamafactory.SECTIONS, legacy_llamafactory.read_llamafactory),
    "verl": (legacy_verl.SECTIONS, legacy_verl.read_verl),
    "mindspeed-rl": (legacy_mindspeed.RL_SECTIONS, legacy_mindspeed.read_mindspeed_rl),
    "mindspeed-mm": (legacy_mindspeed.MM_SECTIONS, legacy_mindspeed.read_mindspeed_mm),
}
BACKENDS = {name: name.replace("-", "_") for name in READERS}
_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_TOP = ("af_model_name", "af_output_dir", "af_backend", "backend", "exp_name", "env", "backend_config")
_DEVICES_A_NODE = 8  # of Snt9b; a node of Snt9b23 has 16 DIE, each of which counts as one device


def read_legacy(text: str, overrides: Sequence[str] = ()) -> Tree:
    """The file with overrides (`--env.NNODES=2`, `--any.key=value`, `--load=DIR`) and references filled in.

    Raises:
        UserError: broken YAML, a section that is none, an override without a place, an unknown reference, or a circle of them.
    """
    tree = _plain_keys(parse_yaml(text))
    for word in overrides:
        path, value = _pair(word)
        _set(tree, _override_keys(path, tree, word), parse_yaml(f"value: {value}")["value"])
    for key, value in mapping(_required(tree, "backend_config"), "backend_config").items():
        if key != legacy_verl.COLLECTOR:
            mapping(value, f"backend_config.{key}")
    _required(tree, "af_model_name")
    resolved: Tree = _resolved(tree, tree, "", ())
    return resolved


def environment(tree: Tree) -> dict[str, str]:
    """The variables of `env`: what AscendFactory 6.5 set before it started anything.

    Raises:
        UserError: `env` is no mapping.
    """
    return {str(name): str(value) for name, value in mapping(tree.get("env"), "env").items() if value is not None}


def _plain_keys(node: Any) -> Any:
    """Keys as text, without the `+` that adds one."""
    if isinstance(node, dict):
        return {str(key).lstrip("+"): _plain_keys(value) for key, value in node.items()}
    return [_plain_keys(item) for item in node] if isinstance(node, list) else node


def _pair(word: str) -> tuple[str, str]:
    """`--key=value` as key and value."""
    if not word.startswith("--"):
        en = "unexpected; the form is 'train FILE --key=value' (that of 'train FILE MODEL EXPERIMENT' ended with release 6.5.902)"
        raise UserError(word, en, "多余的参数；写法为 'train 文件 --键=值'（'train 文件 模型 实验' 的写法止于 6.5.902）")
    path, equals, value = word[2:].partition("=")
    if not equals:
        raise UserError(word, f"needs a value: {word}=...", f"缺少值：{word}=...")
    return path, value


def _override_keys(path: str, tree: Tree, word: str) -> list[str]:
    """The keys from the top of the file; a bare flag such as `load` is one of the trainer's.

    Raises:
        UserError: the key starts nowhere (with the nearest key of the file).
    """
    keys = [key.lstrip("+") for key in path.split(".")]
    if keys[0] in _TOP or keys[0].startswith("af_"):
        return keys
    sections = mapping(tree.get("backend_config"), "backend_config")
    if len(keys) == 1 and isinstance(sections.get("training"), dict):
        return ["backend_config", "training", *keys]
    known = flat(tree)
    found = next((key for key in known if key.endswith(f".{path}")), None) or nearest(path, known)
    guess = found or (f"backend_config.{path}" if keys[0] in sections else "backend_config.training.lr")
    raise UserError(
        word, f"no such key; write it from the top of the file, such as --{guess}=...", f"没有这个键；请从文件顶层写起，如 --{guess}=..."
    )


def _set(tree: Tree, keys: list[str], value: Any) -> None:
    *groups, last = keys
    for group in groups:
        inner = tree.get(group)
        if not isinstance(inner, dict):
            inner = tree[group] = {}
        tree = inner
    tree[last] = value


def _resolved(node: Any, root: Tree, place: str, seen: tuple[str, ...]) -> Any:
    """A value with its references filled in.

    Args:
        place: the key that holds it, for messages.
        seen: the references on the way here.
    """
    if isinstance(node, dict):
        return {key: _resolved(value, root, f"{place}.{key}" if place else key, seen) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolved(item, root, place, seen) for item in node]
    if not isinstance(node, str):
        return node
    whole_value = _REFERENCE.fullmatch(node)
    if whole_value:
        return _reference(whole_value[1], root, place, seen)
    return _REFERENCE.sub(lambda found: str(_reference(found[1], root, place, seen)), node)


def _reference(path: str, root: Tree, place: str, seen: tuple[str, ...]) -> Any:
    if path in seen:
        circle = " → ".join((*seen, path))
        raise UserError(place, f"the references form a circle: {circle}", f"引用成环：{circle}")
    node: Any = root
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            guess = nearest(path, flat(root))
            hint, hint_zh = (f"; did you mean ${{{guess}}}?", f"，是否想写 ${{{guess}}}？") if guess else ("", "")
            raise UserError(place, f"${{{path}}} refers to a key that is not there{hint}", f"${{{path}}} 引用的键不存在{hint_zh}")
        node = node[key]
    return _resolved(node, root, place, (*seen, path))


def migrate(tree: Tree, given: ClusterSpec | None = None) -> Migration:
    """The recipe that an old file stands for.

    Args:
        tree: from `read_legacy`.
        given: the devices, where they are said beside the file.

    Raises:
        UserError: the back end cannot be told, a section is unknown, or a mandatory option is missing or wrong.
    """
    sections, model = tree["backend_config"], str(tree["af_model_name"])
    name = _backend(tree, sections)
    _check_sections(sections, name)
    found = Migration({"name": re.sub(r"[^\w.\-]", "-", model), "backend": BACKENDS[name]})
    if tree.get("af_output_dir"):
        found.put("output.dir", str(tree["af_output_dir"]), "af_output_dir")
    num_devices = _cluster(tree, sections, given, found)
    READERS[name][1](sections, found, num_devices)
    _tell_environment(tree, found)
    for key in tree:
        if key not in _TOP and not key.startswith("af_"):
            found.note(f"{key}: has no meaning now; left out", f"{key}：已无意义，删去")
    path = str(found.recipe.get("model", {}).get("path", ""))
    if not Path(path).expanduser().is_dir():
        found.note(f"model.path: {path} is not on this machine; planned by its name", f"model.path：本机没有 {path}；按其名称规划")
    found.close()
    return found


def _required(tree: Tree, key: str) -> Any:
    if tree.get(key):
        return tree[key]
    guess = nearest(key, [other for other in tree if other not in _TOP])
    hint, hint_zh = (f"; did you mean it by '{guess}'?", f"；'{guess}' 是否就是它？") if guess else ("", "")
    what = {"af_model_name": ("write the model, such as qwen2.5-7b", "请写模型，如 qwen2.5-7b")}
    en, zh = what.get(key, ("this is no AscendFactory YAML", "这不是 AscendFactory 的 YAML"))
    raise UserError(key, f"is missing{hint or f'; {en}'}", f"缺失{hint_zh or f'；{zh}'}")


def _backend(tree: Tree, sections: Tree) -> str:
    name = str(tree.get("af_backend") or tree.get("backend") or _guess(sections))
    if name not in BACKENDS:
        names = ", ".join(BACKENDS)
        guess = nearest(name, BACKENDS)
        hint, hint_zh = (f"did you mean {guess}?", f"是否想写 {guess}？") if guess else (f"write one of {names}", f"可写 {names}")
        raise UserError("af_backend", f"'{name}' is no back end; {hint}", f"'{name}' 不是后端；{hint_zh}")
    return name


def _guess(sections: Tree) -> str:
    """The back end, by the sections and the spelling that only it has."""
    if "actor_rollout_ref" in sections:
        return "verl"
    if "megatron_training" in sections:
        return "mindspeed-rl"
    if "data" in sections or "model" in sections:
        return "mindspeed-mm"
    if {"preprocess_data", "convert_ckpt_hf2mg", "convert_ckpt_mg2hf"} & set(sections):
        return "mindspeed-llm"
    training = sections.get("training")
    return "mindspeed-llm" if isinstance(training, dict) and any("-" in str(key) for key in training) else "llamafactory"


def _check_sections(sections: Tree, name: str) -> None:
    known = READERS[name][0]
    for key in sections:
        if key not in known:
            guess = nearest(key, known)
            all_names = ", ".join(known)
            hint, hint_zh = (f"did you mean '{guess}'?", f"是否想写 '{guess}'？") if guess else (f"it has {all_names}", f"可用 {all_names}")
            raise UserError(f"backend_config.{key}", f"{name} has no such section; {hint}", f"{name} 没有这个部分；{hint_zh}")


def _cluster(tree: Tree, sections: Tree, given: ClusterSpec | None, found: Migration) -> int:
    """The devices of the run: those beside the file, else those of this machine, else the Ascend nodes that the file is for.

    Returns:
        their number, over all nodes.
    """
    here = detect()
    if given is None:
        env = mapping(tree.get("env"), "env")
        nodes = whole(env, "NNODES", 1, "env.")
        a_node = _devices_a_node(env, sections, nodes)
        given = ClusterSpec(nodes=nodes, nproc=a_node or "auto")
        if here is None:
            kind = "snt9b23" if a_node > _DEVICES_A_NODE else "snt9b"
            given = ClusterSpec(device=kind, nodes=nodes, nproc=a_node or _DEVICES_A_NODE)
            words = f"{nodes}x{given.nproc} {kind}"
            found.note(
                f"cluster: no accelerator here; planned for {words}; for other devices write --cluster='{nodes}x16 snt9b23' or the like",
                f"cluster：本机没有加速器；按 {words} 规划；其他设备请写 --cluster='{nodes}x16 snt9b23' 等",
            )
    found.put("cluster", given.model_dump(exclude_defaults=True) | {"nodes": given.nodes}, "env.NNODES")
    a_node = given.nproc if given.nproc != "auto" else 1 if given.device == "cpu" else here.num_devices if here else _DEVICES_A_NODE
    return given.nodes * a_node


def _devices_a_node(env: Tree, sections: Tree, nodes: int) -> int:
    """What the file says of the devices of one node; 0 where it says nothing."""
    if visible := str(env.get("ASCEND_RT_VISIBLE_DEVICES") or ""):
        return len([part for part in visible.split(",") if part.strip()])
    trainer, rl = mapping(sections.get("trainer"), "backend_config.trainer"), mapping(sections.get("rl_config"), "backend_config.rl_config")
    if a_node := trainer.get("n_gpus_per_node"):
        return whole({"n_gpus_per_node": a_node}, "n_gpus_per_node", 8, "backend_config.trainer.")
    actor = mapping(rl.get("actor_resource"), "backend_config.rl_config.actor_resource")
    return whole(actor, "num_npus", 0, "backend_config.rl_config.actor_resource.") // nodes


def _tell_environment(tree: Tree, found: Migration) -> None:
    """Variables are no part of a recipe: only the number of nodes is."""
    usual = {"MASTER_ADDR": "localhost", "NODE_RANK": "0", "NNODES": None}
    names = [name for name, value in environment(tree).items() if usual.get(name, "") not in (None, value)]
    if names:
        words = ", ".join(f"env.{name}" for name in names)
        found.note(
            f"{words}: no part of a recipe; 'train' of this file sets them, with a recipe set them in the shell",
            f"{words}：不属于配方；直接 train 此文件时会设置，使用配方时请在 shell 中设置",
        )

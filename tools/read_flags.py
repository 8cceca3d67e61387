"""Reads which options a framework accepts from its own parsers, and writes them as JSON (names, types, choices: facts, no code).

    python tools/read_flags.py llamafactory > ascendfactory/backends/flags/llamafactory-0.9.5.json
    python tools/read_flags.py mindspeed --llm DIR --mindspeed DIR --megatron DIR > .../flags/mindspeed_llm-2.2.0.json
    python tools/read_flags.py mindspeed-tools --llm DIR > .../flags/mindspeed_llm_tools-2.2.0.json
    python tools/read_flags.py verl > .../flags/verl-0.9.1.json

Run it with the Python of the framework's environment (for MindSpeed any Python with torch and transformers: what only Ascend has is
replaced by inert modules, since declaring options computes nothing). Every profile's file in ascendfactory/backends/flags is made so.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any

from parsers.inert import OPTIONAL, stand_in

NUMBERS = {int: "int", float: "float", str: "str", bool: "bool"}


def llamafactory() -> dict[str, Any]:
    """Fields of the dataclasses that its HfArgumentParser fills."""
    os.environ.setdefault("DISABLE_VERSION_CHECK", "1")
    from llamafactory.hparams import parser  # type: ignore[import-not-found]

    table: dict[str, Any] = {}
    for cls in parser._TRAIN_ARGS:
        hints = typing.get_type_hints(cls)
        for name, field in cls.__dataclass_fields__.items():
            if field.init:
                table[name] = annotation(hints[name])
    return table


def annotation(hint: Any) -> dict[str, Any]:
    """A type hint as {type, choices}; unions of several types are left open."""
    parts = [part for part in (typing.get_args(hint) if is_union(hint) else (hint,)) if part is not type(None)]
    choices = [value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)]
    if choices:
        return {"choices": choices}
    enum = [member.value for part in parts if hasattr(part, "__members__") for member in part]
    if enum:
        return {"choices": enum}
    kinds = {NUMBERS.get(part) for part in parts}
    if kinds <= {"int", "float"} and None not in kinds:
        return {"type": "float" if "float" in kinds else "int"}
    return {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}


def is_union(hint: Any) -> bool:
    """Whether a hint is `A | B` or Optional."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def from_argparse(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Long options of an argparse parser."""
    table = {}
    for action in parser._actions:
        names = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
        if not names or names == ["help"]:
            continue
        facts: dict[str, Any] = {}
        if action.nargs == 0:
            facts["type"] = "flag"
        elif action.type in NUMBERS:
            facts["type"] = NUMBERS[action.type]
        if action.choices:
            facts["choices"] = [getattr(choice, "name", choice) for choice in action.choices]
        if action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 1):
            facts["many"] = True
        if action.required:
            facts["required"] = True
        for name in names:
            table[name] = facts
    return table


def mindspeed(llm: Path, core: Path, megatron: Path, mm: bool) -> dict[str, Any]:
    """Options of Megatron's parser as MindSpeed-LLM (or MindSpeed-MM) extends it."""
    sys.path[:0] = [str(llm), str(core), str(megatron)]
    os.environ.update(WORLD_SIZE="8", RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="6000", LOCAL_WORLD_SIZE="8")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    stand_in(OPTIONAL)
    os.chdir(llm)
    sys.argv = ["pretrain_gpt.py"]
    found: list[argparse.ArgumentParser] = []
    real = argparse.ArgumentParser.parse_known_args

    def look(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found.append(self)
        return real(self, args, namespace)

    provider = None
    if mm:
        import mindspeed.megatron_adaptor  # type: ignore[import-not-found]  # noqa: F401
        from mindspeed_mm.arguments import extra_args_provider_decorator  # type: ignore[import-not-found]
        from mindspeed_mm.configs.config import mm_extra_args_provider  # type: ignore[import-not-found]

        provider = extra_args_provider_decorator(mm_extra_args_provider)
    else:
        from mindspeed_llm import megatron_adaptor  # type: ignore[import-not-found]  # noqa: F401
    from megatron.training import arguments  # type: ignore[import-not-found]

    argparse.ArgumentParser.parse_known_args = look  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        arguments.parse_args(provider, True)
    return from_argparse(max(found, key=lambda parser: len(parser._actions)))


def mindspeed_tools(llm: Path) -> dict[str, Any]:
    """Options of preprocess_data.py, convert_ckpt.py and convert_ckpt_v2.py: their parser functions are run by themselves."""
    table: dict[str, Any] = {}
    deepseek = "examples/mcore/deepseek3/convert_ckpt_deepseek3_mcore2hf.py"
    for name in ("preprocess_data.py", "convert_ckpt_v2.py", "convert_ckpt.py", deepseek):
        if (llm / name).exists():
            table[name] = tool_options(llm, name)
    return table


def tool_options(llm: Path, name: str) -> dict[str, Any]:
    """Every `add_argument` of a tool and of the plug-ins it loads, read from its source."""
    paths = [llm / name]
    if name == "convert_ckpt.py":
        base = llm / "mindspeed_llm/tasks/checkpoint"
        paths += [base / "loader_hf.py", base / "loader_mg.py", base / "saver.py", base / "saver_hf.py"]
    table: dict[str, Any] = {}
    for path in paths:
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                table |= declared(node)
    return table


def declared(call: ast.Call) -> dict[str, Any]:
    """One `add_argument` as name → facts."""
    names = [a.value.removeprefix("--") for a in call.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
    words = {word.arg: word.value for word in call.keywords}
    facts: dict[str, Any] = {}
    action = words.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        facts["type"] = "flag"
    elif isinstance(words.get("type"), ast.Name) and words["type"].id in ("int", "float", "str"):  # type: ignore[attr-defined]
        facts["type"] = words["type"].id  # type: ignore[attr-defined]
    if isinstance(words.get("choices"), (ast.List, ast.Tuple)):
        with contextlib.suppress(ValueError):
            facts["choices"] = list(ast.literal_eval(words["choices"]))
    if "nargs" in words:
        facts["many"] = True
    if isinstance(words.get("required"), ast.Constant) and words["required"].value:  # type: ignore[attr-defined]
        facts["required"] = True
    return dict.fromkeys(names, facts)


def verl() -> dict[str, Any]:
    """Leaves of verl's packaged configuration, for its FSDP and its Megatron trainer."""
    from hydra import compose, initialize_config_module  # type: ignore[import-not-found]
    from omegaconf import DictConfig, ListConfig  # type: ignore[import-not-found]

    table: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        for key in node:
            path = f"{prefix}{key}"
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() and len(child):
                walk(child, f"{path}.")
                continue
            value = (
                None
                if child is None or child._is_missing() or child._is_interpolation() or isinstance(child, ListConfig)
                else node.get(key)
            )
            table.setdefault(path, {"type": "bool"} if isinstance(value, bool) else {})

    trainers = ("ppo_trainer", "ppo_megatron_trainer")
    seen = []
    for config in trainers:
        before = dict(table)
        table.clear()
        with initialize_config_module("verl.trainer.config", version_base=None):
            walk(compose(config_name=config), "")
        seen.append(dict(table))
        table |= before
    for name in table:  # an option of one trainer only
        if (name in seen[0]) != (name in seen[1]):
            table[name] = table[name] | {"only": trainers[0] if name in seen[0] else trainers[1]}
    return table


def main() -> None:
    """Prints the table of one framework."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["llamafactory", "mindspeed", "mindspeed-mm", "mindspeed-tools", "verl"])
    for name in ("--llm", "--mindspeed", "--megatron"):
        parser.add_argument(name, type=lambda text: Path(text).resolve())
    given, out = parser.parse_args(), sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        match given.framework:
            case "llamafactory":
                table = llamafactory()
            case "verl":
                table = verl()
            case "mindspeed-tools":
                table = mindspeed_tools(given.llm)
            case _:
                table = mindspeed(given.llm, given.mindspeed, given.megatron, given.framework == "mindspeed-mm")
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(table[name], ensure_ascii=False)}" for name in sorted(table))
    print("{\n" + rows + "\n}", file=out)
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

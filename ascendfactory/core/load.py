"""From text to a Recipe and back: YAML, dotted overrides, and every problem at once.

Relative paths inside a recipe file are relative to the directory in which the command is run, not to the file.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ascendfactory.core.fields import ROOT, Node, all_keys, key_node, kind_of
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.problems import RecipeError, explain, show
from ascendfactory.core.recipe import Recipe
from ascendfactory.core.schema import recipe_schema

__all__ = ["RecipeError", "dump_recipe", "load_recipe", "parse_yaml", "recipe_schema"]

# The scalars of YAML 1.2's core schema, with `1e-5` and `1_000` besides. YAML 1.1, which PyYAML reads by itself,
# makes `1e-5` text, `no` a boolean, `1:30` a number and `2024-01-01` a date.
_SCALARS: list[tuple[str, str, str]] = [
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("merge", r"^(?:<<)$", "<"),
]


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_letters in _SCALARS:
        for letter in first_letters:
            table.setdefault("" if letter == "\0" else letter, []).append((f"tag:yaml.org,2002:{tag}", re.compile(pattern)))
    return table


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; a key written twice is an error."""

    yaml_implicit_resolvers = _resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and name != "<<":
                raise UserError(
                    f"line {line}",
                    f"the key '{name}' was already written on line {seen[name]}; keep one of them",
                    f"键 '{name}' 在第 {seen[name]} 行已经写过，请只保留一处",
                )
            seen[name] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads back unchanged."""

    yaml_implicit_resolvers = _resolvers()

    def represent_text(self, text: str) -> yaml.Node:
        """Line breaks that only Unicode knows are escaped: written as they are, YAML would fold them."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set("\x85\u2028\u2029") else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def load_recipe(text: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that the text and the overrides say, every default filled in.

    Args:
        text: YAML. Its relative paths are relative to the current directory.
        overrides: `--optim.lr=1e-5` or `optim.lr=1e-5`, applied in order; values are YAML.

    Raises:
        RecipeError: with one line for every problem found.
    """
    data = parse_yaml(text)
    for override in overrides:
        _override(data, override)
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(error, data)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, every setting written out; `load_recipe` gives the same recipe back."""
    return yaml.dump(recipe.model_dump(mode="python"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_yaml(text: str) -> dict[str, Any]:
    """A mapping out of YAML 1.2 text; an empty text is an empty one.

    Raises:
        RecipeError: broken YAML, a key that is written twice, or something else than a mapping.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
    except UserError as problem:
        raise RecipeError([problem]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError([UserError(where, f"not YAML: {error.problem or error.context}", f"YAML 格式有误：{error.problem}")]) from None
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        line = " ".join(str(error).split())
        raise RecipeError([UserError("", f"the recipe is not YAML: {line}", f"配方不是合法的 YAML：{line}")]) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        shown = show(data)
        raise RecipeError([UserError("", f"a recipe is a mapping (model: ...), not {shown}", f"配方应为映射，而不是 {shown}")])
    return {str(key): value for key, value in data.items()}


def _override(data: dict[str, Any], override: str) -> None:
    """Sets one dotted key in place."""
    path, equals, text = override.removeprefix("--").partition("=")
    keys = re.sub(r"\[(\d+)\]", r".\1", path.strip()).split(".")  # messages write data.train[0].path
    if not equals or not all(keys):
        guess = nearest(path.strip(), all_keys()) or "optim.lr"
        raise RecipeError(
            [UserError(override, f"an override is written --key=value, such as --{guess}=...", f"覆盖项写作 --键=值，如 --{guess}=...")]
        )
    try:
        value = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, UserError, ValueError) as error:
        line = " ".join(str(error).split())
        raise RecipeError([UserError(f"--{path}", f"the value {text!r} is not YAML: {line}", f"值 {text!r} 不是合法的 YAML")]) from None
    _set(data, ROOT, keys, value, path)


def _set(holder: dict[str, Any] | list[Any], node: Node | None, keys: list[str], value: Any, path: str) -> None:
    """Walks to the last key, expanding short forms on the way, and sets it."""
    key, rest = keys[0], keys[1:]
    slot, child = _slot(holder, node, key, path)
    if not rest:
        if isinstance(holder, list):
            holder[int(slot)] = value
        else:
            holder[slot] = value
        return
    held = holder[int(slot)] if isinstance(holder, list) else holder.get(slot)
    inner = child.expand(held) if child and held is not None else held
    if inner is None:
        inner = _empty(child)
    if not isinstance(inner, (dict, list)):
        done = path[: len(path) - len(".".join(rest)) - 1]
        raise RecipeError([UserError(f"--{path}", f"'{done}' is {show(inner)} and has no keys", f"'{done}' 是 {show(inner)}，没有下级键")])
    inner = dict(inner) if isinstance(inner, dict) else list(inner)
    if isinstance(holder, list):
        holder[int(slot)] = inner
    else:
        holder[slot] = inner
    _set(inner, child, rest, value, path)


def _slot(holder: dict[str, Any] | list[Any], node: Node | None, key: str, path: str) -> tuple[str, Node | None]:
    """The index or key to set, and the node that stands there."""
    if isinstance(holder, dict):
        section = node.section(holder) if node else None
        return key, key_node(section, key) if section else None
    if not key.isdigit() or int(key) >= len(holder):
        last = len(holder) - 1
        en, zh = f"'{key}' is not an item of the list; write 0 to {last}", f"'{key}' 不是列表的项，请写 0 到 {last}"
        raise RecipeError([UserError(f"--{path}", en, zh)])
    return key, node.item() if node else None


def _empty(node: Node | None) -> dict[str, Any]:
    """A group that the recipe does not mention yet: its default, written out (of a union only the kind, which may change)."""
    default = node.field.default if node and node.field else None
    if not isinstance(default, BaseModel):
        return {}
    return default.model_dump(include={"kind"} if kind_of(type(default)) else None)

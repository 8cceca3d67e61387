"""Validation errors turned into lines that a person can act on: place, value, what would be right."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ascendfactory.core.fields import ROOT, Node, all_keys, key_node, kind_of
from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.recipe import REWARD_FUNCTION, TOOLS_FILE, ClusterSpec, Data, Duration, Model, Warmup

_WRITTEN_FORMS: dict[type[BaseModel], tuple[str, str]] = {
    Duration: ("such as '500 steps', '3 epochs' or '2e9 tokens'", "如 '500 steps'、'3 epochs' 或 '2e9 tokens'"),
    Warmup: ("such as 0.03 (a fraction of the run) or '100 steps'", "如 0.03（占全程的比例）或 '100 steps'"),
    Model: ("a folder or a model of the catalogue, such as 'model: qwen3-0.6b'", "模型文件夹或目录中的模型名，如 'model: qwen3-0.6b'"),
    Data: ("a file, such as 'data: train.jsonl', or a mapping with the key train", "文件，如 'data: train.jsonl'，或含有键 train 的映射"),
    ClusterSpec: ("such as 'cpu', '8 a100-80g' or '2x8 snt9b'", "如 'cpu'、'8 a100-80g' 或 '2x8 snt9b'"),
}
_TEXT_FORMS: dict[str, tuple[str, str]] = {
    TOOLS_FILE: ("a .py or .yaml file", ".py 或 .yaml 文件"),
    REWARD_FUNCTION: ("auto, or a function such as 'rewards.py:score'", "auto，或函数，如 'rewards.py:score'"),
}


class RecipeError(UserError):
    """A recipe that cannot be read; carries every problem found, one line each.

    Args:
        problems: at least one.
    """

    def __init__(self, problems: list[UserError]) -> None:
        self.problems = problems
        super().__init__("", "\n".join(_in(p, p.en) for p in problems), "\n".join(_in(p, p.zh) for p in problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by its problems."""
        return type(self), (self.problems,)

    @property
    def lines(self) -> list[str]:
        """One line a problem, in the reader's language."""
        return [p.line() for p in self.problems]


def _in(problem: UserError, text: str) -> str:
    return f"{problem.where}: {text}" if problem.where else text


def explain(error: ValidationError, data: dict[str, Any]) -> list[UserError]:
    """One problem for each place that pydantic complained about; unknown keys come last.

    A key that is missing because it is misspelt beside its place is told once, as the misspelling.

    Args:
        error: from `Recipe.model_validate(data)`.
        data: what was validated, as written (short forms allowed).
    """
    found = [(detail, *_locate(detail["loc"], data)) for detail in error.errors(include_url=False)]
    misspelt = {_path([*keys[:-1], nearest(keys[-1], parent.model_fields) or ""]) for d, keys, _, parent in found if _unknown(d) and parent}
    problems: dict[str, UserError] = {}
    for detail, keys, node, parent in sorted(found, key=lambda entry: _unknown(entry[0])):
        where = _path(keys)
        if where not in problems and not (detail["type"] == "missing" and where in misspelt):  # a union complains once for each member
            problems[where] = _problem(detail, where, keys, node, parent)
    return list(problems.values())


def _path(keys: list[str]) -> str:
    """`data.train[0].path`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(keys))


def _unknown(detail: ErrorDetails) -> bool:
    return detail["type"] == "extra_forbidden"


def _locate(loc: tuple[int | str, ...], data: Any) -> tuple[list[str], Node | None, type[BaseModel] | None]:
    """The keys of a pydantic location without its union tags, the node there, and the section that holds it."""
    keys: list[str] = []
    node: Node | None = ROOT
    parent: type[BaseModel] | None = None
    value = data
    for step in loc:
        if node is None:
            keys.append(str(step))  # inside an unknown key
            continue
        value = node.expand(value)
        if isinstance(step, int):
            keys.append(str(step))
            node, parent = node.item(), None
            value = value[step] if isinstance(value, list) and step < len(value) else None
            continue
        section = node.section(value)
        if section is None or (len(node.sections()) > 1 and step == kind_of(section) and step not in section.model_fields):
            if section is None and get_origin(node.annotation) is dict:
                keys.append(step)
            continue  # the tag of a union member: not a key
        keys.append(step)
        node, parent = key_node(section, step), section
        value = value.get(step) if isinstance(value, dict) else None
    return keys, node, parent


def _problem(detail: ErrorDetails, where: str, keys: list[str], node: Node | None, parent: type[BaseModel] | None) -> UserError:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(where, keys[-1], parent)
        case "missing":
            en, zh = expected(node)
            return UserError(where, f"is missing; add it: {en}", f"缺少此项，请补上：{zh}")
        case "union_tag_not_found":
            return _missing_kind(where, node, detail["input"])
        case _:
            return _wrong_value(where, detail, node)


def _unknown_key(where: str, key: str, parent: type[BaseModel] | None) -> UserError:
    here = list(parent.model_fields) if parent else []
    if found := nearest(key, here):
        return UserError(where, f"unknown key; did you mean '{found}'?", f"未知的键，是否想写 '{found}'？")
    if elsewhere := [path for path in all_keys() if path.rsplit(".", 1)[-1] == key]:
        owners = [kind for owner in _kinds_with(key, parent) if (kind := kind_of(owner))]
        if owners:
            return UserError(
                where,
                f"not a setting of kind '{kind_of(parent) if parent else ''}'; it belongs to {_join(owners)}",
                f"不属于 '{kind_of(parent) if parent else ''}'，它是 {_join_zh(owners)} 的设置",
            )
        return UserError(where, f"unknown key here; did you mean '{elsewhere[0]}'?", f"此处没有这个键，是否想写 '{elsewhere[0]}'？")
    return UserError(where, f"unknown key; the keys here are {_join(here)}", f"未知的键，此处可用：{_join_zh(here)}")


def _kinds_with(key: str, parent: type[BaseModel] | None) -> list[type[BaseModel]]:
    """The members of the parent's own union that have the key."""
    unions = [node.sections() for node in all_keys().values() if len(node.sections()) > 1]
    return [s for union in unions if parent in union for s in union if key in s.model_fields]


def _missing_kind(where: str, node: Node | None, value: Any) -> UserError:
    sections = node.sections() if node else []
    written = set(value) if isinstance(value, dict) else set()
    fitting = [str(kind_of(s)) for s in sections if written <= set(s.model_fields)] or [str(kind_of(s)) for s in sections]
    return UserError(
        f"{where}.kind",
        f"is missing; with the keys {_join(sorted(written)) or 'given'} it can be {_join(fitting)}",
        f"缺少此项；按已写的键，可为 {_join_zh(fitting)}",
    )


def _wrong_value(where: str, detail: ErrorDetails, node: Node | None) -> UserError:
    value = detail["input"]
    if detail["type"] == "union_tag_invalid" and isinstance(value, dict):
        value = value.get("kind")
    shown = show(value)
    en, zh = expected(node)
    guess = nearest(value, _words(node)) if isinstance(value, str) else None
    if guess and guess != value:
        en, zh = f"{en}; did you mean '{guess}'?", f"{zh}；是否想写 '{guess}'？"
    if detail["type"] == "value_error" and node is None:
        en = zh = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "string_type" and isinstance(value, (int, float)):
        en, zh = f"{en}: put it in quotes", f"{zh}，请加引号"
    return UserError(where, f"{shown} does not fit; it should be {en}", f"{shown} 不合适；应为{zh}")


def show(value: Any) -> str:
    """A value as one short line."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(words: Iterable[str]) -> str:
    return ", ".join(words)


def _join_zh(words: Iterable[str]) -> str:
    return "、".join(words)


def _or_zh(words: Iterable[str]) -> str:
    """Choices in Chinese; a space keeps Latin letters off the conjunction."""
    joined = "或".join(words)
    return re.sub(r"(?<=[0-9A-Za-z])或", " 或", re.sub(r"或(?=[0-9A-Za-z])", "或 ", joined))


def _words(node: Node | None) -> list[str]:
    """The words that may stand at a node."""
    if node is None:
        return []
    kinds = [kind for s in node.sections() if (kind := kind_of(s))]
    return kinds + [str(w) for c in node.choices() if get_origin(c.annotation) is Literal for w in get_args(c.annotation)]


def expected(node: Node | None) -> tuple[str, str]:
    """What may stand at a node, in English and Chinese."""
    if node is None:
        return "a value of another type", "其他类型的值"
    parts = [_expected_one(Node(c.annotation, c.metadata or node.metadata)) for c in node.choices() if not _is_kind(c)]
    if kinds := [kind for c in node.sections() if (kind := kind_of(c))]:
        return f"one of {_join(kinds)}", f"以下之一：{_join_zh(kinds)}"
    return " or ".join(en for en, _ in parts), _or_zh(zh for _, zh in parts)


def _is_kind(node: Node) -> bool:
    return bool(Node(node.annotation).sections()) and kind_of(node.annotation) is not None


def _expected_one(node: Node) -> tuple[str, str]:
    kind = node.annotation
    if get_origin(kind) is Literal:
        words = [str(w) for w in get_args(kind)]
        return (words[0], words[0]) if len(words) == 1 else (f"one of {_join(words)}", f"以下之一：{_join_zh(words)}")
    if kind in _WRITTEN_FORMS:
        return _WRITTEN_FORMS[kind]
    if kind is bool:
        return "true or false", "true 或 false"
    if kind in (int, float):
        name, name_zh = ("a whole number", "整数") if kind is int else ("a number", "数")
        bounds, bounds_zh = _bounds(node)
        return name + bounds, bounds_zh + name_zh
    if kind is str:
        return _expected_text(node)
    if kind is type(None):
        return "null", "null"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        needed = [k for k, f in kind.model_fields.items() if f.is_required()] or list(kind.model_fields)
        return f"a mapping with the key {_join(needed[:4])}", f"含有键 {_join_zh(needed[:4])} 的映射"
    if get_origin(kind) is dict:
        return "a mapping of text to text", "文本到文本的映射"
    item = node.item()
    inner = expected(item) if item else ("values", "值")
    return f"a list, each item {inner[0]}", f"列表，每项为{inner[1]}"


def _expected_text(node: Node) -> tuple[str, str]:
    pattern = next((found for m in node.metadata if (found := getattr(m, "pattern", None))), None)
    if pattern in _TEXT_FORMS:
        return _TEXT_FORMS[pattern]
    if pattern:
        return "letters, digits, '.', '_' and '-' only", "仅由字母、数字、'.'、'_'、'-' 组成的文本"
    return "text", "文本"


def _bounds(node: Node) -> tuple[str, str]:
    """The bounds of a number: ` above 0`, `大于 0 的`; empty where there are none."""
    found: list[tuple[str, str]] = []
    for mark in (part for m in node.metadata for part in (getattr(m, "metadata", None) or [m])):
        match mark:
            case annotated_types.Gt():
                found.append((f"above {mark.gt}", f"大于 {mark.gt}"))
            case annotated_types.Ge():
                found.append((f"at least {mark.ge}", f"不小于 {mark.ge}"))
            case annotated_types.Lt():
                found.append((f"below {mark.lt}", f"小于 {mark.lt}"))
            case annotated_types.Le():
                found.append((f"at most {mark.le}", f"不大于 {mark.le}"))
    if not found:
        return "", ""
    of = " of " if found[0][0].startswith("at") else " "
    return of + " and ".join(en for en, _ in found), " 且".join(zh for _, zh in found) + " 的"

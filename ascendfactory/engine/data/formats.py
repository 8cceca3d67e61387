"""Records → samples: the five ways in which people write training data, told apart by their fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ascendfactory.core.messages import UserError, nearest
from ascendfactory.core.recipe import Source
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.records import DataFile, first_records, parse

Format = Literal["alpaca", "sharegpt", "messages", "prompt_completion", "text"]
Record = dict[str, Any]
Message = dict[str, Any]
NUM_LOOKED_AT = 16
NEEDED: dict[Format, tuple[str, ...]] = {  # in the order in which they are tried
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL: dict[Format, tuple[str, ...]] = {
    "messages": ("tools",),
    "sharegpt": ("system", "tools"),
    "prompt_completion": ("tools",),
    "alpaca": ("input", "system", "history"),
    "text": (),
}
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}

REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the form that chat templates read."""

    messages: list[Message]
    targets: tuple[int, ...]  # positions of the assistant turns that may be trained
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion, both plain text; no template is applied."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    text: str


Sample = Chat | Pair | Text


def detect_format(source: Source, files: list[DataFile], where: str) -> Format:
    """The format of a source: what the recipe says, else what its first records show.

    Records that cannot be parsed are left to the reading proper, which names them.

    Raises:
        UserError: no record, no known set of fields, or `columns` names a field that is not there.
    """
    records = []
    for raw, index, _ in first_records(files, NUM_LOOKED_AT):
        try:
            records.append(parse(raw, str(index)))
        except RecordError:
            continue
    keys = dict.fromkeys(key for record in records for key in record)
    if not keys:
        raise UserError(where, f"{source.path} holds no record that can be read", f"{source.path} 中没有可读的记录")
    _check_columns(source, list(keys), where)
    if source.format != "auto":
        return source.format
    ours = {name for name in keys if name not in source.columns.values()} | set(source.columns)
    for name, needed in NEEDED.items():
        if ours.issuperset(needed):
            return name
    forms = "; ".join(f"{name}: {' + '.join(needed)}" for name, needed in NEEDED.items())
    raise UserError(
        where,
        f"the fields {', '.join(keys)} fit no format ({forms}); "
        f"say which is which in columns, e.g. columns: {{instruction: {next(iter(keys))}}}",
        f"字段 {', '.join(keys)} 不符合任何格式（{forms}）；请用 columns 对应字段，例如 columns: {{instruction: {next(iter(keys))}}}",
    )


def _check_columns(source: Source, keys: list[str], where: str) -> None:
    formats = [source.format] if source.format != "auto" else list(NEEDED)
    known = [name for form in formats for name in (*NEEDED[form], *OPTIONAL[form])]
    for ours, theirs in source.columns.items():
        if ours not in known:
            near = nearest(ours, known) or ", ".join(dict.fromkeys(known))
            raise UserError(f"{where}.columns.{ours}", f"no field of ours has this name; use {near}", f"没有这个字段名；可用：{near}")
        if theirs not in keys:
            near = nearest(theirs, keys) or ", ".join(keys)
            raise UserError(
                f"{where}.columns.{ours}",
                f"{source.path} has no field {theirs}; it has {near}",
                f"{source.path} 中没有字段 {theirs}；有：{near}",
            )


def to_sample(record: Record, form: Format, columns: Mapping[str, str], place: str) -> Sample:
    """The sample that a record stands for.

    Args:
        columns: our name of a field → its name in the record.
        place: the record's name for messages (`file.jsonl:17`).

    Raises:
        RecordError: a field is missing, has a wrong type, or the answer is empty.
    """
    if columns:
        record = {**record, **{ours: record.get(theirs) for ours, theirs in columns.items()}}
    return _READERS[form](record, place)


def _alpaca(record: Record, place: str) -> Sample:
    instruction, answer = _string(record, "instruction", place), _answer(record, "output", place)
    extra = _string(record, "input", place, optional=True)
    messages: list[Message] = []
    if system := _string(record, "system", place, optional=True):
        messages.append({"role": "system", "content": system})
    for turn in _list(record, "history", place, optional=True):
        if not (isinstance(turn, (list, tuple)) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise RecordError(place, "history must be a list of [question, answer] pairs", "history 应为 [问题, 回答] 的列表")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction})
    messages.append({"role": "assistant", "content": answer})
    return _chat(messages, None, 0, place)


def _sharegpt(record: Record, place: str) -> Sample:
    messages = _messages(_list(record, "conversations", place), "conversations", place)
    if system := _string(record, "system", place, optional=True):
        messages.insert(0, {"role": "system", "content": system})
    return _chat(messages, _tools(record, place), 0, place)


def _openai(record: Record, place: str) -> Sample:
    return _chat(_messages(_list(record, "messages", place), "messages", place), _tools(record, place), 0, place)


def _prompt_completion(record: Record, place: str) -> Sample:
    prompt = record.get("prompt")
    if isinstance(prompt, str):
        return Pair(prompt, _answer(record, "completion", place))
    before = _messages(_list(record, "prompt", place), "prompt", place)
    after = _messages(_list(record, "completion", place), "completion", place)
    return _chat(before + after, _tools(record, place), len(before), place)


def _document(record: Record, place: str) -> Sample:
    return Text(_answer(record, "text", place))


_READERS: dict[Format, Callable[[Record, str], Sample]] = {
    "alpaca": _alpaca,
    "sharegpt": _sharegpt,
    "messages": _openai,
    "prompt_completion": _prompt_completion,
    "text": _document,
}


def _chat(messages: list[Message], tools: list[Any] | None, first_target: int, place: str) -> Chat:
    targets = []
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not message["content"].strip() and not message.get("tool_calls"):
            raise RecordError(place, f"the answer in turn {position + 1} is empty", f"第 {position + 1} 轮的回答为空")
        if message.pop("weight", 1) and position >= first_target:
            targets.append(position)
    if not targets:
        raise RecordError(place, "the conversation holds no answer to train on", "对话中没有可训练的回答")
    if targets[0] == 0:
        raise RecordError(place, "the conversation starts with an answer; put the question before it", "对话以回答开头；请在前面加上提问")
    return Chat(messages, tuple(targets), tools)


def _messages(turns: list[Any], name: str, place: str) -> list[Message]:
    return [_message(turn, f"{name}[{number}]", place) for number, turn in enumerate(turns)]


def _message(turn: Any, name: str, place: str) -> Message:
    if not isinstance(turn, dict):
        raise RecordError(place, f"{name} must be an object with role and content", f"{name} 应为含 role 与 content 的对象")
    said = turn.get("role", turn.get("from"))
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        near = nearest(str(said), ROLES) or ", ".join(ROLES)
        raise RecordError(place, f"{name}: the role {said!r} is not known; use {near}", f"{name}：未知的角色 {said!r}；可用：{near}")
    content = _content(turn.get("content", turn.get("value")), name, place)
    if said == "function_call":
        return {"role": role, "content": "", "tool_calls": _tool_calls(_json(content, name, place), name, place)}
    kept = {
        key: value for key, value in turn.items() if value is not None and key not in ("role", "from", "content", "value", "tool_calls")
    }
    message: Message = {"role": role, "content": content, **kept}
    if reasoning := next((kept[key] for key in REASONING if kept.get(key)), None):
        message["reasoning_content"] = message["thinking"] = reasoning  # some templates read one name, some the other
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = _tool_calls(calls, name, place)
    elif content == "" and turn.get("content", turn.get("value")) is None and role != "assistant":
        raise RecordError(place, f"{name} has no content", f"{name} 没有 content")
    return message


def _content(content: Any, name: str, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise RecordError(place, f"{name}: content must be text (images are not read here)", f"{name}：content 应为文本（此处不读取图像）")


def _tool_calls(calls: Any, name: str, place: str) -> list[dict[str, Any]]:
    """Calls in the form that templates expect: arguments as a mapping, not as JSON text."""
    wrapped = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError(place, f"{name}: a tool call needs a function name", f"{name}：工具调用缺少函数名")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, f"{name}.tool_calls.arguments", place)
        outer = {key: value for key, value in call.items() if key in ("id", "type") and value is not None}
        wrapped.append({"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}})
    return wrapped


def _tools(record: Record, place: str) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools", place) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(place, "tools must be a list of JSON schemas", "tools 应为 JSON schema 的列表")
    return tools


def _json(text: str, name: str, place: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RecordError(place, f"{name} is not JSON: {error.msg}", f"{name} 不是 JSON：{error.msg}") from None


def _string(record: Record, name: str, place: str, optional: bool = False) -> str:
    value = record.get(name)
    if value is None and optional:
        return ""
    if value is None:
        raise _no_field(record, name, place)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise RecordError(place, f"{name} must be text, this is a {kind}", f"{name} 应为文本，这里是 {kind}")
    return value


def _answer(record: Record, name: str, place: str) -> str:
    value = _string(record, name, place)
    if not value.strip():
        raise RecordError(place, f"{name} is empty", f"{name} 为空")
    return value


def _list(record: Record, name: str, place: str, optional: bool = False) -> list[Any]:
    value = record.get(name)
    if isinstance(value, str) and value.strip():  # a table cell that holds JSON
        value = _json(value, name, place)
    if not value and optional:
        return []
    if value is None:
        raise _no_field(record, name, place)
    if not isinstance(value, list) or not value:
        raise RecordError(place, f"{name} must be a list of turns and not empty", f"{name} 应为非空的对话列表")
    return value


def _no_field(record: Record, name: str, place: str) -> RecordError:
    near = nearest(name, record)
    hint_en = f"; did you mean {near}? (columns: {{{name}: {near}}})" if near and near != name else ""
    hint_zh = f"；是否为 {near}？（columns: {{{name}: {near}}}）" if near and near != name else ""
    return RecordError(place, f"the field {name} is missing{hint_en}", f"缺少字段 {name}{hint_zh}")

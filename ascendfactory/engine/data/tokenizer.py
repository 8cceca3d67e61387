"""The tokenizer of a model folder, and the few things of transformers that the data path rests on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jinja2
import orjson
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from ascendfactory.core.messages import UserError, nearest
from ascendfactory.engine.data.counts import RecordError


def load_tokenizer(folder: str, chat_template_file: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder, with the chat template of a file if one is named.

    Raises:
        UserError: no folder, no fast tokenizer in it, no template file, or a template that is not Jinja.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise _no_folder(root)
    if not any((root / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")):
        raise UserError(
            "model.path",
            f"{root} holds no tokenizer; copy tokenizer.json and tokenizer_config.json of the model into it",
            f"{root} 中没有分词器；请将模型的 tokenizer.json 与 tokenizer_config.json 复制到其中",
        )
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(root, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            "model.path", f"the tokenizer in {root} cannot be read: {reason}", f"无法读取 {root} 中的分词器：{reason}"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            "model.path",
            f"the tokenizer in {root} has no tokenizer.json, without which answers cannot be located token by token; save it once with "
            "AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...)",
            f"{root} 中的分词器缺少 tokenizer.json，无法逐词元定位回答；请用 "
            "AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...) 另存一次",
        )
    if chat_template_file is not None:
        tokenizer.chat_template = _read_template(Path(chat_template_file).expanduser())
    return tokenizer


def _no_folder(root: Path) -> UserError:
    names = [entry.name for entry in root.parent.iterdir() if entry.is_dir()] if root.parent.is_dir() else []
    near = nearest(root.name, names)
    hint_en, hint_zh = (f"; did you mean {root.parent / near}?", f"；是否想写 {root.parent / near}？") if near else ("", "")
    return UserError("model.path", f"the folder {root} does not exist{hint_en}", f"文件夹 {root} 不存在{hint_zh}")


def _read_template(path: Path) -> str:
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, names)
        hint_en, hint_zh = (f"; did you mean {near}?", f"；是否想写 {near}？") if near else ("", "")
        raise UserError("data.chat_template", f"the file {path} does not exist{hint_en}", f"文件 {path} 不存在{hint_zh}")
    text = path.read_text(encoding="utf-8")
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"{path}:{error.lineno}", f"the template is not valid Jinja: {error.message}", f"模板不是合法的 Jinja：{error.message}"
        ) from error
    return text


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits that change with the vocabulary, the merges, the special tokens or the chat template."""
    backend = orjson.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("truncation", "padding"):  # left behind by earlier calls, of no effect here
        backend.pop(name, None)
    facts = [backend, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}, tokenizer.chat_template]
    return hashlib.blake2b(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts its BOS before a plain text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def chat_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool) -> str:
    """The Jinja text that renders conversations.

    Raises:
        UserError: the model has none.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "data.chat_template",
            "the data are conversations and this model has no chat template; name a Jinja file in data.chat_template, "
            "take the instruct version of the model, or use prompt + completion",
            "数据为对话，而该模型没有对话模板；请在 data.chat_template 中指定 Jinja 文件，"
            "或使用该模型的 instruct 版本，或改用 prompt + completion",
        )
    return str(tokenizer.get_chat_template(None, [{}] if has_tools else None))


def render(
    template: str, special_tokens: dict[str, str], messages: list[dict[str, Any]], tools: list[Any] | None, *, prompt: bool, place: str
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, by the sandboxed Jinja of transformers.

    Its two functions are used directly: the public ones copy every message on every call, which takes half of the time.
    A test holds them against `apply_chat_template`.

    Args:
        prompt: end with the generation prompt, as for inference.
        place: the record's name for messages.

    Returns:
        (text, character spans that the template marks with {% generation %}, in order).

    Raises:
        RecordError: the template refuses this conversation, or fails on it.
        UserError: the template is not Jinja.
    """
    try:
        compiled = _compile_jinja_template(template)
        if prompt or "endgeneration" not in template:
            variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            return compiled.render(**variables, **special_tokens), []
        text, marks = _render_with_assistant_indices(compiled, messages, tools, None, prompt, **special_tokens)  # type: ignore[no-untyped-call]
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            "data.chat_template", f"the template is not valid Jinja: {error.message}", f"模板不是合法的 Jinja：{error.message}"
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        reason = str(error).strip().split("\n")[0]
        raise RecordError(place, f"the chat template refuses this conversation: {reason}", f"对话模板拒绝该对话：{reason}") from error
    return text, marks

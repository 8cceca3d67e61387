"""Samples → text with the spans of characters that are trained. Works on text only; tokens come later.

Where a template marks answers itself ({% generation %}), its marks are taken. Elsewhere an answer
is what stands between the prompt of its turn (the conversation up to it, rendered as for inference)
and the conversation with it. Both must be prefixes of the text that is trained on: then the
model is trained in exactly the context that it meets when used. A template that renders earlier
turns differently once a later one exists (reasoning left out, another end marker) breaks
this; such a conversation becomes several samples, each ending where the prefixes still hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Pretrain, Sft
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.formats import Chat, Message, Pair, Sample
from ascendfactory.engine.data.tokenizer import adds_bos, chat_template, render

Span = tuple[int, int]
THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class Marked:
    """A text and which of its characters are trained."""

    text: str
    spans: Sequence[Span]  # [start, end) in characters, ascending
    bos: bool = False  # BOS goes before the text
    eos: bool = False  # EOS goes after the text, trained
    is_document: bool = False  # may be cut into several rows


class Renderer:
    """Renders samples for one tokenizer and one objective."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, objective: Pretrain | Sft) -> None:
        self._tokenizer = tokenizer
        self._train_on = objective.train_on if isinstance(objective, Sft) else "all"
        self._special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | set(tokenizer.all_special_tokens)
        self._markers = tuple(sorted(special, key=len, reverse=True))  # the longest one matches first
        self._bos = adds_bos(tokenizer)
        self._templates: dict[bool, str] = {}

    def mark(self, sample: Sample, place: str) -> list[Marked]:
        """The texts of a sample: one, or several where the template rewrites earlier turns.

        Raises:
            RecordError: the template refuses the conversation or leaves a part of it out.
            UserError: the tokenizer lacks a template or an EOS token.
        """
        if isinstance(sample, Chat):
            return self._chat(sample, place)
        if isinstance(sample, Pair):
            return [self._plain(sample.prompt + sample.completion, 0 if self._train_on == "all" else len(sample.prompt), False)]
        return [self._plain(sample.text, 0, True)]

    def _plain(self, text: str, start: int, is_document: bool) -> Marked:
        """Text without a template: BOS where the tokenizer wants it, EOS in any case."""
        eos = self._eos()
        return Marked(text, [(start, len(text))], self._bos, not text.endswith(eos), is_document)

    def _eos(self) -> str:
        if self._tokenizer.eos_token is None:
            raise UserError(
                "model.path",
                "the tokenizer names no eos_token, so no answer could ever end; add it to tokenizer_config.json",
                "分词器未指定 eos_token，回答将无法结束；请在 tokenizer_config.json 中补上",
            )
        return str(self._tokenizer.eos_token)

    def _chat(self, chat: Chat, place: str) -> list[Marked]:
        template = self._template(chat, place)
        if self._train_on == "all":
            text, _ = self._render(template, chat, len(chat.messages), place)
            self._check_kept(chat, len(chat.messages), text, place)
            closed = text.rstrip().endswith(self._markers)
            return [Marked(text, [(0, len(text))], eos=not closed and bool(self._eos()))]
        targets = chat.targets[-1:] if self._train_on == "last" else chat.targets
        return self._from_marks(template, chat, targets, place) or self._from_prefixes(template, chat, targets, place)

    def _template(self, chat: Chat, place: str) -> str:
        has_tools = chat.tools is not None
        if has_tools not in self._templates:
            self._templates[has_tools] = chat_template(self._tokenizer, has_tools)
        template = self._templates[has_tools]
        if has_tools and "tools" not in template:
            raise RecordError(
                place,
                "the record has tools and the chat template knows none, so they would be lost; name another template in data.chat_template",
                "记录含有 tools，而对话模板不支持，将会丢失；请在 data.chat_template 中换用其他模板",
            )
        if "tool_calls" not in template and any("tool_calls" in message for message in chat.messages):
            raise RecordError(
                place,
                "the record has tool calls and the chat template knows none, so they would be lost; "
                "name another template in data.chat_template",
                "记录含有工具调用，而对话模板不支持，将会丢失；请在 data.chat_template 中换用其他模板",
            )
        return template

    def _render(self, template: str, chat: Chat, count: int, place: str, prompt: bool = False) -> tuple[str, list[Span]]:
        return render(template, self._special_tokens, chat.messages[:count], chat.tools, prompt=prompt, place=place)

    def _from_marks(self, template: str, chat: Chat, targets: Sequence[int], place: str) -> list[Marked]:
        """By the template's own marks; nothing if it has none, or if they do not match the turns one to one."""
        if "endgeneration" not in template:
            return []
        count = targets[-1] + 1
        text, marks = self._render(template, chat, count, place)
        answers = [position for position in range(count) if chat.messages[position]["role"] == "assistant"]
        if len(marks) != len(answers):
            return []
        span_of = dict(zip(answers, marks, strict=True))
        if any(self._lost_part(chat.messages[t], text[slice(*span_of[t])]) for t in targets):
            return []
        self._check_kept(chat, count, text, place)
        return [self._close(text, [span_of[t] for t in targets])]

    def _from_prefixes(self, template: str, chat: Chat, targets: Sequence[int], place: str) -> list[Marked]:
        """By comparing each prompt and each finished turn with the whole, the last turn first."""
        spans: dict[int, Span] = {}
        texts: dict[int, str] = {}
        for target in targets:
            prompt, _ = self._render(template, chat, target, place, prompt=True)
            text, _ = self._render(template, chat, target + 1, place)
            if not text.startswith(prompt):
                raise self._not_a_prefix(prompt, text, target, place)
            if lost := self._lost_part(chat.messages[target], text[len(prompt) :]):
                raise self._left_out(lost, target, place)
            spans[target], texts[target] = (len(prompt), len(text)), text
        found = []
        todo = list(targets)
        while todo:
            whole = texts[todo[-1]]
            held = [target for target in todo if whole.startswith(texts[target])]
            self._check_kept(chat, todo[-1] + 1, whole, place)
            found.append(self._close(whole, [spans[target] for target in held]))
            todo = [target for target in todo if target not in held]
        return found

    def _close(self, text: str, spans: Sequence[Span]) -> Marked:
        """Makes every span end with the token that ends its turn, and with nothing after it.

        White space that the template puts after the end marker is never generated, so it is not trained.
        Where the template closes a turn only by opening the next one (GLM-4), the opening token is what the
        model must produce to stop, and is trained; at the end of the conversation EOS is.
        """
        closed = []
        eos = False
        for start, end in spans:
            stripped = start + len(text[start:end].rstrip())
            if text.endswith(self._markers, start, stripped):
                end = stripped
            elif marker := next((m for m in self._markers if text.startswith(m, end)), None):
                end += len(marker)
            elif not text[end:].strip():
                eos, end = bool(self._eos()), stripped
                text = text[:end]
            closed.append((start, end))
        return Marked(text, closed, eos=eos)

    @staticmethod
    def _lost_part(message: Message, rendered: str) -> str | None:
        """What of an answer does not stand in its rendering: its reasoning, its text, or nothing."""
        thought, _, said = message["content"].rpartition(THINK_END)
        reasoning = str(message.get("reasoning_content") or "") or thought.replace("<think>", "")
        for part in (reasoning.strip(), said.strip()):
            if part and part not in rendered:
                return part
        return None

    def _check_kept(self, chat: Chat, count: int, text: str, place: str) -> None:
        """Every turn's own words stand in the text (tool results may be escaped, earlier reasoning may be left out)."""
        for position, message in enumerate(chat.messages[:count]):
            said = message["content"].rpartition(THINK_END)[2].strip()
            if said and said not in text and message["role"] != "tool":
                raise self._left_out(said, position, place)

    def _left_out(self, words: str, position: int, place: str) -> RecordError:
        shown = words[:40] + ("…" if len(words) > 40 else "")
        return RecordError(
            place,
            f"the chat template leaves out a part of turn {position + 1}: {shown!r}; name a template that keeps it in data.chat_template",
            f"对话模板丢掉了第 {position + 1} 轮的一部分：{shown!r}；请在 data.chat_template 中指定会保留它的模板",
        )

    def _not_a_prefix(self, prompt: str, text: str, position: int, place: str) -> RecordError:
        same = next((n for n, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), min(len(prompt), len(text)))
        return RecordError(
            place,
            f"turn {position + 1}: for inference the template writes {prompt[same : same + 30]!r} where for training it writes "
            f"{text[same : same + 30]!r}, so the model would be used otherwise than it is trained; "
            "name another template in data.chat_template",
            f"第 {position + 1} 轮：推理时模板写 {prompt[same : same + 30]!r}，训练时写 {text[same : same + 30]!r}，二者不一致；"
            "请在 data.chat_template 中换用其他模板",
        )

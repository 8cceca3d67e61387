"""Talking to a model: a folder becomes a `Chat`, which streams answers; `answer` asks a model that is being trained.

Shape letters: B prompts, S positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from ascendfactory.core.messages import UserError, nearest, pick
from ascendfactory.engine.data.tokenizer import load_tokenizer
from ascendfactory.engine.device import has_bf16_units

Message = dict[str, str]  # role, content

STOCK_ATTENTION = "sdpa"  # ours has no key/value cache
REPL_ANSWER_TOKENS = 512
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what the bytes of an unfinished character decode to


@dataclass(frozen=True)
class Chat:
    """A model ready to answer."""

    model: Any
    tokenizer: Any

    def stream(self, messages: list[Message], max_new_tokens: int, temperature: float = 0.0) -> Iterator[str]:
        """The answer to a conversation, piece by piece; a piece never ends inside a character.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], the last one to be answered.
            max_new_tokens: where the answer is cut off.
            temperature: 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature).

        Raises:
            UserError: the conversation fills the model's context.
        """
        prompt = encode(self.tokenizer, messages)
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(prompt) >= limit:
            raise UserError(
                "",
                f"the conversation has {len(prompt)} tokens and the model reads at most {limit}; start afresh with /clear",
                f"对话已有 {len(prompt)} 个词元，而模型最多读取 {limit} 个；请用 /clear 重新开始",
            )
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))
        stops = stop_tokens(self.model, self.tokenizer)
        return whole_characters(generate_tokens(self.model, prompt, room, temperature, stops), self.decode)

    def decode(self, tokens: list[int]) -> str:
        """Tokens as text, without the special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def load_chat(folder: str) -> Chat:
    """A model for chatting, on this machine's accelerator if it has one.

    Args:
        folder: a Hugging Face folder, a peft adapter whose base model is on this machine, or a run folder (its export/).

    Raises:
        UserError: the folder holds no model, or an adapter's base model is missing.
    """
    root = find_model(folder)
    adapter = root / "adapter_config.json"
    base = _base_of(adapter) if adapter.exists() else root
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # The weights' own dtype where it is fast; bfloat16 on a CPU without units for it is 50 times slower than float32.
    dtype: Any = "auto" if has_bf16_units(device.type) else torch.float32
    with _without_progress_bars():
        try:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, attn_implementation=STOCK_ATTENTION, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:  # damaged or missing weights, unknown architecture
            reason = str(error).strip().splitlines()[0]
            raise UserError(str(base), f"the model cannot be read: {reason}", f"无法读取模型：{reason}") from error
        if base != root:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(root))
    has_tokenizer = (root / "tokenizer_config.json").exists() or (root / "tokenizer.json").exists()
    return Chat(model.to(device).eval(), load_tokenizer(str(root if has_tokenizer else base)))


def find_model(folder: str) -> Path:
    """The folder with config.json or adapter_config.json that a person means: this one, or the export of this run.

    Raises:
        UserError: there is no such folder, or no model in it.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        siblings = [entry.name for entry in root.parent.iterdir() if entry.is_dir()] if root.parent.is_dir() else []
        near = nearest(root.name, siblings)
        hint_en, hint_zh = (f"; did you mean {root.parent / near}?", f"；是否想写 {root.parent / near}？") if near else ("", "")
        en = f"no such folder; give a model folder or a run folder{hint_en}"
        raise UserError(folder, en, f"文件夹不存在；请给出模型或运行的文件夹{hint_zh}")
    for place in (root, root / "export"):
        if (place / "config.json").exists() or (place / "adapter_config.json").exists():
            return place
    if (root / "plan.json").exists():
        en = f"this run has not exported a model yet; finish it, or write one with: ascendfactory export {folder}"
        raise UserError(folder, en, f"该运行尚未导出模型；请先完成训练，或执行：ascendfactory export {folder}")
    en = "no model here (neither config.json nor adapter_config.json); give a Hugging Face folder, an adapter or a run folder"
    zh = "此处没有模型（既无 config.json 也无 adapter_config.json）；请给出 Hugging Face 文件夹、适配器或运行的文件夹"
    raise UserError(folder, en, zh)


def _base_of(adapter_config: Path) -> Path:
    name = json.loads(adapter_config.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    for place in (Path(name), adapter_config.parent / name):  # as written, or beside the adapter when both were moved
        if name and (place / "config.json").exists():
            return place
    raise UserError(
        str(adapter_config),
        f"the adapter's base model {name!r} is not on this machine; put its folder in base_model_name_or_path",
        f"适配器的基础模型 {name!r} 不在本机；请在 base_model_name_or_path 中写上它的文件夹",
    )


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def encode(tokenizer: Any, messages: list[Message]) -> list[int]:
    """A conversation as tokens, ready to be answered; without a chat template (a base model) the plain texts, joined."""
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the generation config's, and the tokenizer's EOS, which some models leave out of it."""
    named = model.generation_config.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})


def generate_tokens(model: Any, prompt: list[int], max_new_tokens: int, temperature: float, stops: list[int]) -> Iterator[int]:
    """Tokens of the answer one at a time, as the model produces them; closing the iterator ends the work."""
    cache = None
    tokens_BS = torch.tensor([prompt], device=model.device)
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            step = model(input_ids=tokens_BS, cache=cache, use_cache=True, logits_to_keep=1)
        token = choose(step.logits[0, -1], temperature)
        if token in stops:
            return
        yield token
        cache, tokens_BS = step.cache, tokens_BS.new_tensor([[token]])


def choose(logits_V: Tensor, temperature: float) -> int:
    """The likeliest token at temperature 0, else one drawn from softmax(logits / temperature)."""
    if temperature <= 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1))


def whole_characters(tokens: Iterator[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Text pieces of a token stream; bytes of an unfinished character wait for the rest, and are dropped if it never comes."""
    seen: list[int] = []
    written = 0
    for token in tokens:
        seen.append(token)
        # All tokens anew each time: what one decodes to may depend on those before it.
        text = decode(seen)
        # A newly begun character can only be at the end; broken bytes farther back are the model's own.
        whole = text.rstrip(BROKEN)
        if len(whole) > written:
            yield whole[written:]
            written = len(whole)


def answer(model: Any, tokenizer: Any, prompts: list[str], max_new_tokens: int = 96) -> list[str]:
    """Greedy answers to single questions, generated as one batch.

    Works in the middle of training: training mode and attention are put back, and no gradient is recorded. Under FSDP
    every process must call it with the same prompts.

    Args:
        model: a transformers or peft model, or a module that holds one as `.hf`.
    """
    hf = getattr(model, "hf", model)
    base = hf.get_base_model() if hasattr(hf, "get_base_model") else hf
    rows = [encode(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    if not rows:
        return []
    stops = stop_tokens(base, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    width = max(map(len, rows))
    device = next(hf.parameters()).device
    tokens_BS = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask_BS = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    # FSDP gathers the root's weights in a forward method of the root only.
    generate = getattr(model, "generate", hf.generate)
    with _as_for_inference(model, base):
        answers_BS = generate(
            input_ids=tokens_BS,
            attention_mask=mask_BS,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=stops or None,
            pad_token_id=pad,
        )[:, width:]
    return [text.rstrip(BROKEN).strip() for text in tokenizer.batch_decode(answers_BS, skip_special_tokens=True)]


@contextmanager
def _as_for_inference(model: Any, base: Any) -> Iterator[None]:
    """Evaluation mode and transformers' own attention for the time being, without gradients."""
    modes = {module: module.training for module in model.modules()}
    attention = base.config._attn_implementation
    model.eval()
    base.set_attn_implementation(STOCK_ATTENTION)
    try:
        with torch.no_grad():  # not inference_mode: FSDP keeps the gathered weights
            yield
    finally:
        base.set_attn_implementation(attention)
        for module, training in modes.items():
            module.training = training


def chat(folder: str, prompt: str | None = None) -> None:
    """Talks in the terminal: one answer if a prompt is given, else a conversation until /exit or the end of input.

    Ctrl-C stops an answer and keeps what was said so far.

    Raises:
        UserError: as `load_chat`.
    """
    talk = load_chat(folder)
    if prompt is not None:
        _say(talk, [{"role": "user", "content": prompt}])
        return
    with suppress(ImportError):  # line editing and recall of earlier lines, where Python has it
        import readline  # noqa: F401
    print(pick("/clear starts afresh, /exit ends, Ctrl-C stops an answer", "/clear 重新开始，/exit 退出，Ctrl-C 停止回答"))
    messages: list[Message] = []
    while (line := _read_line()) is not None:
        if line == "/clear":
            messages = []
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _say(talk, messages)})
            except UserError as error:  # the conversation became too long
                print(error.line())
                messages.pop()


def _read_line() -> str | None:
    """The next line of the person, or None at the end."""
    try:
        line = input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "/exit" else line


def _say(talk: Chat, messages: list[Message]) -> str:
    """Prints the answer while it is produced, and returns what was printed."""
    said = ""
    try:
        for piece in talk.stream(messages, REPL_ANSWER_TOKENS):
            print(piece, end="", flush=True)
            said += piece
    except KeyboardInterrupt:
        pass
    print()
    return said

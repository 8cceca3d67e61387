"""Masks: the trained text is exactly the answers with their end markers, under every template style."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Pretrain, Sft
from ascendfactory.engine.data.chat import Encoded, encode, mask_tokens
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.formats import Chat, Pair, Text
from tests.engine.data.templates import CHATML, GEMMA, GLM4, LLAMA3, MARKED, OPENED_THOUGHT, PLAIN, QWEN3, SILENT_ABOUT_SYSTEM, THOUGHTLESS

Q1, A1, Q2, A2 = "What is the capital of France?", "Paris.", "And of Peru?", "Lima, 你好 🙂\n\ndone"


def chat(*texts: str, system: str | None = None, tools=None, **last) -> Chat:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    messages[-1].update(last)
    return Chat(messages, tuple(n for n, m in enumerate(messages) if m["role"] == "assistant"), tools)


def trained_text(tokenizer, encoded: Encoded) -> str:
    return tokenizer.decode(encoded.ids[encoded.trained], skip_special_tokens=False)


def full_text(tokenizer, encoded: Encoded) -> str:
    return tokenizer.decode(encoded.ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "options", "end"),
    [
        (CHATML, {"eos": "<|im_end|>"}, "<|im_end|>"),
        (CHATML, {"eos": "<|im_end|>", "pad": "<|im_end|>"}, "<|im_end|>"),
        (CHATML, {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}, "<|im_end|>"),
        (MARKED, {"eos": "<|im_end|>"}, "<|im_end|>"),
        (LLAMA3, {"eos": "<|eot_id|>", "bos": "<|begin_of_text|>", "adds_bos": True}, "<|eot_id|>"),
        (GEMMA, {"eos": "<end_of_turn>", "bos": "<|begin_of_text|>", "adds_bos": True}, "<end_of_turn>"),
    ],
    ids=["chatml", "pad is eos", "pad is eos, other end", "marked", "llama3", "gemma"],
)
def test_every_answer_and_its_end_is_trained(make_tokenizer, template, options, end) -> None:
    tokenizer = make_tokenizer(template, **options)
    (encoded,) = encode(chat(Q1, A1, Q2, A2), tokenizer, Sft())
    assert trained_text(tokenizer, encoded) == A1 + end + A2 + end
    expected = tokenizer.apply_chat_template(chat(Q1, A1, Q2, A2).messages, tokenize=True, return_dict=False)
    assert encoded.ids.tolist() == expected
    (last,) = encode(chat(Q1, A1, Q2, A2), tokenizer, Sft(train_on="last"))
    assert trained_text(tokenizer, last) == A2 + end
    (everything,) = encode(chat(Q1, A1, Q2, A2), tokenizer, Sft(train_on="all"))
    assert everything.trained.tolist() == [False] + [True] * (everything.ids.size - 1)
    assert everything.ids.tolist() == expected


def test_default_system_prompt_is_rendered_and_not_trained(make_tokenizer) -> None:
    tokenizer = make_tokenizer(CHATML)
    (encoded,) = encode(chat(Q1, A1), tokenizer, Sft())
    assert full_text(tokenizer, encoded).startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>")
    assert trained_text(tokenizer, encoded) == "Paris.<|im_end|>"


def test_glm4_style_trains_the_token_that_ends_a_turn_and_eos_at_the_end(make_tokenizer) -> None:
    tokenizer = make_tokenizer(GLM4, eos="<|endoftext|>")
    (encoded,) = encode(chat(Q1, A1, Q2, A2, system="Be brief."), tokenizer, Sft())
    assert trained_text(tokenizer, encoded) == "Paris.<|user|>" + A2 + "<|endoftext|>"
    assert full_text(tokenizer, encoded).endswith(A2 + "<|endoftext|>")


def test_template_without_any_marker_gets_eos(make_tokenizer) -> None:
    tokenizer = make_tokenizer(PLAIN, eos="<|endoftext|>")
    (encoded,) = encode(chat(Q1, A1), tokenizer, Sft())
    assert full_text(tokenizer, encoded) == f"user: {Q1}\nassistant: Paris.<|endoftext|>"
    # the blank before the answer merges with its first letters; most of that token is answer, so it is trained
    assert trained_text(tokenizer, encoded).strip() == "Paris.<|endoftext|>"


def test_qwen3_style_rewrites_history_so_every_turn_is_trained_in_its_own_context(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    sample = chat(Q1, "<think>\nhm\n</think>\n\nParis.", Q2, "<think>\nwell\n</think>\n\nLima.")
    second, first = encode(sample, tokenizer, Sft())
    assert trained_text(tokenizer, second) == "<think>\nwell\n</think>\n\nLima.<|im_end|>"
    assert "hm" not in full_text(tokenizer, second)  # as in use: earlier thoughts are gone
    assert trained_text(tokenizer, first) == "<think>\nhm\n</think>\n\nParis.<|im_end|>"
    assert Q2 not in full_text(tokenizer, first)
    assert first.key == second.key
    for encoded, prompt in ((first, sample.messages[:1]), (second, sample.messages[:3])):
        seen = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert encoded.ids[: len(seen)].tolist() == seen
        assert not encoded.trained[: len(seen)].any() and encoded.trained[len(seen)]


def test_qwen3_style_tool_loop_is_one_sequence(make_tokenizer) -> None:
    tokenizer = make_tokenizer(QWEN3)
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Lima"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Lima?"},
        {"role": "assistant", "content": "", "reasoning_content": "need a tool", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "reasoning_content": "easy"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
    (encoded,) = encode(Chat(messages, (2, 4), tools), tokenizer, Sft())
    assert trained_text(tokenizer, encoded) == (
        '<think>\nneed a tool\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call><|im_end|>'
        "<think>\neasy\n</think>\n\nSunny.<|im_end|>"
    )
    assert '"description": "d"' in full_text(tokenizer, encoded)


def test_untrained_turns_stay_context(make_tokenizer) -> None:
    tokenizer = make_tokenizer(CHATML)
    sample = chat(Q1, A1, Q2, A2)
    (encoded,) = encode(Chat(sample.messages, (3,)), tokenizer, Sft())
    assert trained_text(tokenizer, encoded) == A2 + "<|im_end|>"
    (first,) = encode(Chat(sample.messages, (1,)), tokenizer, Sft())
    assert trained_text(tokenizer, first) == A1 + "<|im_end|>" and Q2 not in full_text(tokenizer, first)


@pytest.mark.parametrize(
    ("template", "sample", "words"),
    [
        (OPENED_THOUGHT, chat(Q1, A1), "inference"),
        (THOUGHTLESS, chat(Q1, "<think>deep thought</think>Paris."), "leaves out"),
        (THOUGHTLESS, chat(Q1, "Paris.", reasoning_content="deep thought"), "leaves out"),
        (GEMMA, chat(Q1, A1, system="Be brief."), "System role not supported"),
        (
            GEMMA,
            Chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}], (2,)),
            "alternate",
        ),
        (CHATML, chat(Q1, A1, tools=[{"type": "function"}]), "tools"),
        (CHATML, chat(Q1, "", tool_calls=[{"function": {"name": "f", "arguments": {}}}]), "tool calls"),
        (GLM4.replace("message['content']", "''"), chat(Q1, A1), "leaves out"),
        (SILENT_ABOUT_SYSTEM, chat(Q1, A1, system="Be brief."), "leaves out a part of turn 1: 'Be brief.'"),
    ],
)
def test_what_a_template_would_lose_is_refused(make_tokenizer, template, sample, words) -> None:
    tokenizer = make_tokenizer(template, bos="<|begin_of_text|>")
    with pytest.raises(RecordError, match=words) as caught:
        encode(sample, tokenizer, Sft(), "data.jsonl:7")
    assert caught.value.where == "data.jsonl:7"


def test_chat_data_without_a_template_names_the_key_to_set(make_tokenizer) -> None:
    with pytest.raises(UserError, match=r"data\.chat_template") as caught:
        encode(chat(Q1, A1), make_tokenizer(None), Sft())
    assert not isinstance(caught.value, RecordError)


def test_prompt_completion_is_joined_as_it_is(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None, eos="<|endoftext|>", bos="<|begin_of_text|>", adds_bos=True)
    (encoded,) = encode(Pair("Q: who?\nA:", " The fox."), tokenizer, Sft())
    assert full_text(tokenizer, encoded) == "<|begin_of_text|>Q: who?\nA: The fox.<|endoftext|>"
    assert trained_text(tokenizer, encoded) == " The fox.<|endoftext|>"
    (all_of_it,) = encode(Pair("Q: who?\nA:", " The fox."), tokenizer, Sft(train_on="all"))
    assert all_of_it.trained[1:].all()


def test_documents_end_with_one_eos_and_are_trained_whole(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None, eos="<|endoftext|>")
    for text in ("The lazy dog.", "The lazy dog.<|endoftext|>"):
        (encoded,) = encode(Text(text), tokenizer, Pretrain())
        assert full_text(tokenizer, encoded) == "The lazy dog.<|endoftext|>"
        assert encoded.trained.tolist() == [False] + [True] * (encoded.ids.size - 1)
        assert encoded.is_document
    with pytest.raises(UserError, match="eos_token"):
        encode(Text("x"), make_tokenizer(None, eos=None), Pretrain())


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_text_is_masked_exactly(make_tokenizer, turns) -> None:
    tokenizer = make_tokenizer(CHATML)
    turns = [turn.strip() or "x" for turn in turns]
    turns = turns[: len(turns) // 2 * 2]
    (encoded,) = encode(chat(*turns), tokenizer, Sft())
    assert trained_text(tokenizer, encoded) == "".join(answer + "<|im_end|>" for answer in turns[1::2])


@given(st.integers(1, 40), st.data())
@settings(deadline=None)
def test_mask_tokens_agrees_with_counting_characters(num_chars, data) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, num_chars)))) or [num_chars]
    offsets = list(zip([0, *cuts[:-1]], cuts, strict=True))
    edges = sorted(data.draw(st.sets(st.integers(0, num_chars), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    chars = np.zeros(num_chars + 1)
    for low, high in spans:
        chars[low:high] = 1
    expected = [chars[start:end].sum() * 2 > end - start for start, end in offsets]
    other = [(0, 3), (3, 4)]  # a neighbour before and after must not leak in
    mask = mask_tokens([other, offsets, other], [[(0, 4)], spans, []], [4, num_chars, 4])
    assert mask.tolist() == [True, True, *expected, False, False]


def test_offsets_that_leave_out_white_space_still_cover_it() -> None:
    # "\n" of ids reported as (6, 6), " b" as (7, 8): both belong to the stretch from 5 on
    assert mask_tokens([[(0, 5), (6, 6), (7, 8)]], [[(5, 8)]], [8]).tolist() == [False, True, True]

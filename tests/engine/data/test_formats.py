"""Records of every format become the samples they stand for."""

from __future__ import annotations

import json

import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Source
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.formats import Chat, Pair, Text, detect_format, to_sample
from ascendfactory.engine.data.records import list_files
from tests.engine.data.conftest import write_jsonl

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("form", "record", "expected"),
    [
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, Chat([USER, ANSWER], (1,))),
        (
            "alpaca",
            {"instruction": "q", "input": "more", "output": "a", "system": "s", "history": [["q0", "a0"]]},
            Chat(
                [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "q0"},
                    {"role": "assistant", "content": "a0"},
                    {"role": "user", "content": "q\nmore"},
                    ANSWER,
                ],
                (2, 4),
            ),
        ),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, Chat([USER, ANSWER], (1,))),
        (
            "sharegpt",
            {"conversations": json.dumps([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}])},
            Chat([USER, ANSWER], (1,)),
        ),
        ("sharegpt", {"system": "s", "conversations": [USER, ANSWER]}, Chat([{"role": "system", "content": "s"}, USER, ANSWER], (2,))),
        ("messages", {"messages": [USER, ANSWER, USER, {**ANSWER, "weight": 0}]}, Chat([USER, ANSWER, USER, ANSWER], (1,))),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {**ANSWER, "reasoning": "r", "name": None}]},
            Chat([USER, {**ANSWER, "reasoning": "r", "reasoning_content": "r", "thinking": "r"}], (1,)),
        ),
        ("prompt_completion", {"prompt": "p", "completion": " c"}, Pair("p", " c")),
        ("prompt_completion", {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, Chat([USER, ANSWER, USER, ANSWER], (3,))),
        ("text", {"text": "t"}, Text("t")),
    ],
)
def test_records_become_samples(form, record, expected) -> None:
    assert to_sample(record, form, {}, "f:1") == expected


def test_tool_calls_of_both_writings() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    expected = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}, ANSWER]
    shared = {
        "tools": json.dumps(tools),
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "1"},
            {"from": "gpt", "value": "a"},
        ],
    }
    assert to_sample(shared, "sharegpt", {}, "f:1") == Chat(expected, (1, 3), tools)
    openai_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    openai = {"tools": tools, "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [openai_call]}, expected[2], ANSWER]}
    sample = to_sample(openai, "messages", {}, "f:1")
    assert sample.messages[1]["tool_calls"] == [{**call, "id": "c1"}] and sample.targets == (1, 3)


def test_columns_rename() -> None:
    sample = to_sample({"question": "q", "answer": "a"}, "alpaca", {"instruction": "question", "output": "answer"}, "f:1")
    assert sample == Chat([USER, ANSWER], (1,))


@pytest.mark.parametrize(
    ("form", "record", "words"),
    [
        ("alpaca", {"instruction": "q", "outputs": "a"}, r"output is missing; did you mean outputs\? \(columns: {output: outputs}\)"),
        ("alpaca", {"instruction": "q", "output": None}, "output is missing"),
        ("alpaca", {"instruction": "q", "output": " "}, "output is empty"),
        ("alpaca", {"instruction": 3, "output": "a"}, "instruction must be text, this is a int"),
        ("alpaca", {"instruction": "q", "output": "a", "history": ["x"]}, "pairs"),
        ("sharegpt", {"conversations": [{"from": "humann", "value": "q"}]}, "'humann' is not known; use human"),
        ("sharegpt", {"conversations": []}, "not empty"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]}, "turn 2 is empty"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "a"}]}, "starts with an answer"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}]}, "no answer"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{"}]}, "not JSON"),
        ("messages", {"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "must be text"),
        ("messages", {"messages": [{"role": "user"}, ANSWER]}, "no content"),
        ("messages", {"messages": "hello"}, "not JSON"),
        ("messages", {"messages": [USER, ANSWER], "tools": {"a": 1}}, "tools must be a list"),
        ("prompt_completion", {"prompt": "p"}, "completion is missing"),
        ("text", {"text": 5}, "must be text"),
    ],
)
def test_bad_records_say_where_and_what(form, record, words) -> None:
    with pytest.raises(RecordError, match=words) as caught:
        to_sample(record, form, {}, "data.jsonl:17")
    assert caught.value.where == "data.jsonl:17" and caught.value.zh


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"instruction": "", "output": ""}, "alpaca"),
        ({"conversations": []}, "sharegpt"),
        ({"messages": [], "prompt": "x"}, "messages"),
        ({"prompt": "", "completion": ""}, "prompt_completion"),
        ({"text": "", "id": 1}, "text"),
    ],
)
def test_detection(tmp_path, record, form) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    assert detect_format(Source(path=str(path)), list_files(str(path), ""), "data.train[0]") == form


def test_detection_with_columns_and_its_errors(tmp_path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}])
    files = list_files(str(path), "")

    def detect(**settings) -> str:
        return detect_format(Source(path=str(path), **settings), files, "data.train[0]")

    assert detect(columns={"instruction": "question", "output": "answer"}) == "alpaca"
    assert detect(columns={"prompt": "question", "completion": "answer"}) == "prompt_completion"
    with pytest.raises(UserError, match=r"data\.train\[0\]: the fields question, answer fit no format"):
        detect()
    with pytest.raises(UserError, match=r"columns\.instruction: .* has no field questio; it has question"):
        detect(columns={"instruction": "questio"})
    with pytest.raises(UserError, match=r"columns\.instructions: .* use instruction"):
        detect(columns={"instructions": "question"})
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no record that can be read"):
        detect_format(Source(path=str(tmp_path / "empty.jsonl")), list_files(str(tmp_path / "empty.jsonl"), ""), "data.train[0]")

"""Data rewritten for other frameworks: the same samples, whatever the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.engine.data.rewrite import Spec, rewrite


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _rewrite(tmp_path: Path, form: str, rows: list[dict[str, Any]], **facts: Any) -> list[dict[str, Any]]:
    source = {"path": _write(tmp_path / "in.jsonl", rows), **facts.pop("source", {})}
    rewrite(Spec.model_validate({"form": form, "train": [source], **facts}), tmp_path / "out")
    return [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text(encoding="utf-8").splitlines()]


QUESTION, ANSWER = {"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "2+2?", "output": "4"},
        {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"conversations": [QUESTION, ANSWER]},
    ],
)
def test_every_chat_format_becomes_the_same_row(tmp_path: Path, row: dict[str, Any]) -> None:
    assert _rewrite(tmp_path, "conversations", [row]) == [{"conversations": [QUESTION, ANSWER], "system": "", "tools": ""}]


def test_tool_turns(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "done"},
    ]
    [row] = _rewrite(tmp_path, "conversations", [{"messages": messages, "tools": [{"type": "function"}]}])
    assert row["system"] == "S" and json.loads(row["tools"]) == [{"type": "function"}]
    assert [turn["from"] for turn in row["conversations"]] == ["human", "function_call", "observation", "gpt"]
    assert json.loads(row["conversations"][1]["value"]) == [call["function"]] and row["conversations"][2]["value"] == "4\n5"


@pytest.mark.parametrize("weight, expected", [(2.0, 8), (0.5, 2), (1.5, 6)])
def test_weights_repeat_or_thin_out(tmp_path: Path, weight: float, expected: int) -> None:
    assert len(_rewrite(tmp_path, "text", [{"text": f"t{i}"} for i in range(4)], source={"weight": weight})) == expected


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"instruction": "Q", "chosen": "good", "rejected": "bad"},
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {
            "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}],
            "rejected": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "bad"}],
        },
    ],
)
def test_preferences(tmp_path: Path, row: dict[str, Any]) -> None:
    [found] = _rewrite(tmp_path, "preference", [row])
    assert found["conversations"] == [{"from": "human", "value": "Q"}]
    assert (found["chosen"]["value"], found["rejected"]["value"]) == ("good", "bad")


def test_rl_rows_have_verls_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = [{"question": "How many?", "answer": "3 + 4 #### 7"}, {"prompt": "What is 1+1?", "answer": 2}]
    rewrite(Spec.model_validate({"form": "rl", "train": [{"path": _write(tmp_path / "in.jsonl", rows)}]}), tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in table] == ["7", "2"]
    told = 'Think step by step, and write the final answer after "####".'
    assert table[0]["prompt"] == [{"role": "user", "content": f"How many? {told}"}]
    assert table[1]["extra_info"] == {"index": 1, "split": "train"}


def test_a_row_that_names_its_rule_keeps_its_question(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = [{"question": "How many?", "answer": 7, "data_source": "math_dapo"}, {"question": "Write it after ####.", "answer": 7}]
    rewrite(Spec.model_validate({"form": "rl", "train": [{"path": _write(tmp_path / "in.jsonl", rows)}]}), tmp_path / "out")
    table = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in table] == ["How many?", "Write it after ####."]
    assert [row["data_source"] for row in table] == ["math_dapo", "openai/gsm8k"]


def test_bad_rows_stop_with_their_place_or_are_skipped(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": ""}]
    with pytest.raises(UserError, match=r"in\.jsonl:2: output is empty"):
        _rewrite(tmp_path, "conversations", rows)
    assert len(_rewrite(tmp_path, "conversations", rows, bad_lines="skip")) == 1


def test_what_a_framework_cannot_express_is_said(tmp_path: Path) -> None:
    masked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    with pytest.raises(UserError, match="only the embedded engine"):
        _rewrite(tmp_path, "conversations", [{"messages": [*masked, *masked[:1], {"role": "assistant", "content": "c"}]}])
    with pytest.raises(UserError, match="has no chosen and rejected; it has output, prompt"):
        _rewrite(tmp_path, "preference", [{"prompt": "a", "output": "b"}])

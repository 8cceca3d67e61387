"""Sources of a recipe, rewritten as one file in the single form that another framework reads without surprises.

    python -m ascendfactory.engine.data.rewrite SPEC.json OUT_FOLDER

SPEC names the form, the sources and what happens to bad lines. The folder gets `train` and, with evaluation sources, `eval`
(.jsonl or .parquet). Every framework then sees the same samples as the embedded engine, whatever format the person's files have.

Forms: `text` {text}; `conversations` {conversations: [{from, value}], system, tools}; `preference` the same with chosen and
rejected; `alpaca_pairs` {instruction, input, chosen, rejected}; `rl` rows with verl's columns; `question_answer` {problem, answer}.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Source
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.formats import Chat, Message, Pair, Record, Text, detect_format, to_sample
from ascendfactory.engine.data.records import first_records, list_files, parse, read_file

Form = Literal["text", "conversations", "preference", "alpaca_pairs", "rl", "question_answer"]
Row = dict[str, Any]
NUM_LOOKED_AT = 16
_SPEAKERS = {"user": "human", "assistant": "gpt", "tool": "observation"}
_QUESTIONS = ("prompt", "problem", "question")
_ANSWERS = ("answer", "ground_truth", "solution", "labels")
# Rows that name no rule are scored by verl's rule for GSM8K, which finds an answer behind "####" only: the prompt has to say so.
_GSM8K = "openai/gsm8k"
_GSM8K_ASKS = 'Think step by step, and write the final answer after "####".'


class Spec(BaseModel):
    """What to rewrite."""

    model_config = ConfigDict(extra="forbid")

    form: Form
    train: list[Source]
    eval: list[Source] = []
    bad_lines: Literal["stop", "skip"] = "stop"


def rewrite(spec: Spec, folder: Path) -> dict[str, int]:
    """Writes the files of a spec; returns how many rows each part has, and how many records were skipped.

    Raises:
        UserError: a source cannot be read, or a record cannot be used where bad_lines is stop.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "eval": 0, "bad": 0}
    for part, sources in (("train", spec.train), ("eval", spec.eval)):
        if not sources:
            continue
        rows = _rows(spec, sources, part, counts)
        counts[part] = (
            _write_parquet(rows, folder / f"{part}.parquet") if spec.form == "rl" else _write_lines(rows, folder / f"{part}.jsonl")
        )
        if not counts[part]:
            raise UserError(f"data.{part}", "holds no record that can be used", "中没有可用的记录")
    return counts


def _rows(spec: Spec, sources: list[Source], part: str, counts: dict[str, int]) -> Iterator[Row]:
    for number, source in enumerate(sources):
        reader = _reader(spec.form, source, f"data.{part}[{number}].path")
        position = 0
        for place, raw in _records(source, f"data.{part}[{number}].path"):
            try:
                row = reader({**parse(raw, place)}, place)
            except RecordError as bad:
                if spec.bad_lines == "stop":
                    raise
                counts["bad"] += 1
                print(f"skipped {bad.line()}", file=sys.stderr)
                continue
            # weight 2 writes a row twice, 0.5 every second one
            copies = math.floor((position + 1) * source.weight + 1e-9) - math.floor(position * source.weight + 1e-9)
            position += 1
            for _ in range(copies):
                yield row if spec.form != "rl" else {**row, "extra_info": {"index": position - 1, "split": part}}


def _records(source: Source, where: str) -> Iterator[tuple[str, Any]]:
    for file in list_files(source.path, where):
        for raw, index, _ in read_file(file):
            yield file.place(index), raw


def _reader(form: Form, source: Source, where: str) -> Callable[[Record, str], Row]:
    """The function that turns a record of this source into a row."""
    if form in ("text", "conversations"):
        found = detect_format(source, list_files(source.path, where), where)
        shape = _text_row if form == "text" else _conversation_row
        return lambda record, place: shape(to_sample(record, found, source.columns, place), place)
    _check_fields(source, where, ("chosen", "rejected") if form in ("preference", "alpaca_pairs") else ())
    shapes: dict[str, Callable[[Record, str], Row]] = {
        "preference": _preference_row,
        "alpaca_pairs": _pair_row,
        "rl": _verl_row,
        "question_answer": _question_row,
    }
    shape_of = shapes[form]
    return lambda record, place: shape_of({**record, **{ours: record.get(theirs) for ours, theirs in source.columns.items()}}, place)


def _check_fields(source: Source, where: str, needed: tuple[str, ...]) -> None:
    keys: set[str] = set()
    for raw, index, _ in first_records(list_files(source.path, where), NUM_LOOKED_AT):
        try:
            keys |= set(parse(raw, str(index)))
        except RecordError:
            continue
    missing = [name for name in needed if name not in keys | set(source.columns)]
    if missing:
        raise UserError(
            where,
            f"{source.path} has no {' and '.join(missing)}; it has {', '.join(sorted(keys))}: name one in columns: {{{missing[0]}: ...}}",
            f"{source.path} 没有 {'、'.join(missing)}，已有 {'、'.join(sorted(keys))}；请用 columns: {{{missing[0]}: ...}} 指定",
        )


def _text_row(sample: Any, place: str) -> Row:
    match sample:
        case Text(text):
            return {"text": text}
        case Pair(prompt, completion):
            return {"text": prompt + completion}
    raise RecordError(place, "pre-training here reads documents (text), not conversations", "此后端的预训练读取文档（text），不读取对话")


def _conversation_row(sample: Any, place: str) -> Row:
    if not isinstance(sample, Chat):
        raise RecordError(
            place,
            "fine-tuning here reads conversations; plain text has no turns (write it as instruction and output)",
            "此后端的微调读取对话，纯文本没有轮次（请写成 instruction 与 output）",
        )
    answers = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    if list(sample.targets) != answers:
        raise RecordError(
            place,
            "only some answers are to be trained (weight: 0, or answers inside the prompt); only the embedded engine does that",
            "只训练部分回答（weight: 0，或提示中含有回答）；仅内置引擎支持",
        )
    system, turns = _turns(sample.messages, place)
    return {"conversations": turns, "system": system, "tools": json.dumps(sample.tools, ensure_ascii=False) if sample.tools else ""}


def _turns(messages: list[Message], place: str) -> tuple[str, list[Row]]:
    """System prompt and alternating turns; results of several tools become one turn, as the readers of this form expect."""
    system = "\n".join(m["content"] for m in messages if m["role"] in ("system", "developer"))
    turns: list[Row] = []
    for message in messages:
        if message["role"] in ("system", "developer"):
            continue
        speaker, text = _SPEAKERS[message["role"]], message["content"]
        if calls := message.get("tool_calls"):
            speaker, text = "function_call", json.dumps([call["function"] for call in calls], ensure_ascii=False)
        if turns and turns[-1]["from"] == speaker == "observation":
            turns[-1]["value"] += f"\n{text}"
        elif turns and (turns[-1]["from"] in ("human", "observation")) == (speaker in ("human", "observation")):
            raise RecordError(place, "two turns of one side follow each other; merge them", "同一方连续发言，请合并")
        else:
            turns.append({"from": speaker, "value": text})
    while turns and turns[-1]["from"] in ("human", "observation"):
        turns.pop()  # nothing follows it: no token of it is trained
    return system, turns


def _preference_row(record: Record, place: str) -> Row:
    before, chosen, rejected = _preference(record, place)
    system, turns = _turns([*before, {"role": "assistant", "content": chosen}], place)
    return {
        "conversations": turns[:-1],
        "system": system,
        "tools": "",
        "chosen": {"from": "gpt", "value": chosen},
        "rejected": {"from": "gpt", "value": rejected},
    }


def _pair_row(record: Record, place: str) -> Row:
    before, chosen, rejected = _preference(record, place)
    if [m["role"] for m in before if m["role"] != "system"] != ["user"]:
        raise RecordError(place, "a preference pair of several turns is not read here", "此后端不读取多轮偏好对")
    system = next((m["content"] for m in before if m["role"] == "system"), "")
    return {"instruction": before[-1]["content"], "input": "", "system": system, "chosen": chosen, "rejected": rejected}


def _preference(record: Record, place: str) -> tuple[list[Message], str, str]:
    """The turns before, and the two answers."""
    chosen, rejected = _last_answer(record.get("chosen"), "chosen", place), _last_answer(record.get("rejected"), "rejected", place)
    turns = record.get("conversations") or record.get("messages") or record.get("prompt")
    if turns is None and isinstance(record.get("instruction"), str):
        turns = "\n".join(filter(None, (record["instruction"], record.get("input"))))
    if turns is None and isinstance(record.get("chosen"), list):
        turns = record["chosen"][:-1]
    if isinstance(turns, str) and turns.strip():
        turns = [{"role": "user", "content": turns}]
    if not turns or not isinstance(turns, list):
        raise RecordError(
            place,
            "the prompt is missing (prompt, instruction, conversations or messages)",
            "缺少提示（prompt、instruction、conversations 或 messages）",
        )
    whole = to_sample({"messages": [*turns, {"role": "assistant", "content": chosen}]}, "messages", {}, place)
    assert isinstance(whole, Chat)
    before = whole.messages[:-1]
    if isinstance(system := record.get("system"), str) and system and before[0]["role"] != "system":
        before = [{"role": "system", "content": system}, *before]
    return before, chosen, rejected


def _last_answer(value: Any, name: str, place: str) -> str:
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, dict):
        value = value.get("content", value.get("value"))
    if not isinstance(value, str) or not value.strip():
        raise RecordError(place, f"{name} is empty or no text", f"{name} 为空或不是文本")
    return value


def _question_and_answer(record: Record, place: str) -> tuple[Any, str]:
    question = next((record[name] for name in _QUESTIONS if record.get(name)), None)
    answer = next((record[name] for name in _ANSWERS if record.get(name) is not None), None)
    if question is None or answer is None:
        missing, names = ("question", _QUESTIONS) if question is None else ("answer", _ANSWERS)
        raise RecordError(
            place, f"the {missing} is missing ({', '.join(names)}); name it in columns", f"缺少 {'、'.join(names)} 之一；请用 columns 指定"
        )
    text = str(answer)
    # GSM8K writes the result after its reasoning, behind "####"
    return question, text.rsplit("####", 1)[-1].strip() if "####" in text else text


def _question_row(record: Record, place: str) -> Row:
    question, answer = _question_and_answer(record, place)
    if not isinstance(question, str):
        raise RecordError(place, "the question must be text", "问题应为文本")
    return {"problem": question, "answer": answer}


def _verl_row(record: Record, place: str) -> Row:
    if isinstance(record.get("reward_model"), dict) and isinstance(record.get("prompt"), list):
        return {
            name: record[name] for name in ("data_source", "prompt", "ability", "reward_model", "images") if record.get(name) is not None
        }
    question, answer = _question_and_answer(record, place)
    source = str(record.get("data_source") or _GSM8K)
    if isinstance(question, str) and source == _GSM8K and "####" not in question:
        question = f"{question} {_GSM8K_ASKS}"
    prompt = question if isinstance(question, list) else [{"role": "user", "content": str(question)}]
    row: Row = {
        "data_source": source,
        "prompt": prompt,
        "ability": str(record.get("ability") or "math"),
        "reward_model": {"style": "rule", "ground_truth": answer},
    }
    return row | ({"images": record["images"]} if record.get("images") else {})


def _write_lines(rows: Iterator[Row], path: Path) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
            number += 1
    return number


def _write_parquet(rows: Iterator[Row], path: Path) -> int:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    table = pa.Table.from_pylist(list(rows))
    if table.num_rows:
        pq.write_table(table, path)
    return int(table.num_rows)


def main(argv: list[str]) -> int:
    """Runs the program; exit code 2 with one line on stderr for what the person can mend."""
    spec, folder = argv
    try:
        counts = rewrite(Spec.model_validate_json(Path(spec).read_text(encoding="utf-8")), Path(folder))
    except UserError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return 2
    print(f"data: {counts['train']} training rows, {counts['eval']} for evaluation, {counts['bad']} skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

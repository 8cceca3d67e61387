"""The preview shows what would be trained, and the mask check refuses what should not be."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Recipe
from ascendfactory.engine.data.counts import Counts
from ascendfactory.engine.data.loader import open_data
from ascendfactory.engine.data.preview import check_mask, preview, render
from tests.engine.data import templates
from tests.engine.data.conftest import alpaca, recipe, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer(templates.LLAMA3, eos="<|eot_id|>", bos="<|begin_of_text|>")


def text_of(shown) -> str:
    console = Console(file=io.StringIO(), width=400, force_terminal=True, color_system="standard")
    console.print(render(shown))
    return console.file.getvalue()


def test_samples_are_shown_with_their_trained_text(tmp_path, tokenizer) -> None:
    record = {"instruction": "What is the capital?", "output": "Paris.", "history": [["Hi", "Hello."]]}
    path = write_jsonl(tmp_path / "a.jsonl", [record, {"instruction": "q", "output": ""}])
    shown = preview(recipe(tmp_path, str(path), bad_lines="skip"), tokenizer)
    (sample,) = shown.samples
    assert sample.place == f"{path}:1"
    assert [text for text, trained in sample.runs if trained] == ["Hello.<|eot_id|>", "Paris.<|eot_id|>"]
    assert "".join(text for text, _ in sample.runs).startswith("<|begin_of_text|><|start_header_id|>user")
    assert shown.formats == [(str(path), "alpaca")] and shown.complete
    assert (shown.counts.records, shown.counts.bad, shown.counts.samples) == (2, 1, 1)
    printed = text_of(shown)
    assert "\x1b[1;32mParis.<|eot_id|>" in printed and "alpaca" in printed and f"{path}:2" in printed.replace("\n", "")


def test_counts_are_those_of_the_run(tmp_path, tokenizer) -> None:
    paths = [str(write_jsonl(tmp_path / "a.jsonl", alpaca(80))), str(write_jsonl(tmp_path / "b.jsonl", [{"text": "word " * 300}]))]
    made = recipe(tmp_path, paths, seq_len=64, shuffle=False)
    shown, counts = preview(made, tokenizer, 4), open_data(made, tokenizer).counts
    assert shown.counts == counts and counts.truncated > 1
    assert [sample.place.split("/")[-1] for sample in shown.samples] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert not (tmp_path / "cache2").exists()


def test_the_preview_does_not_read_on(tmp_path, tokenizer, monkeypatch) -> None:
    from ascendfactory.engine.data import preview as preview_module

    monkeypatch.setattr(preview_module, "MAX_RECORDS", 10)
    path = write_jsonl(tmp_path / "a.jsonl", alpaca(30))
    shown = preview(recipe(tmp_path, str(path)), tokenizer)
    assert shown.counts.records == 10 and not shown.complete
    assert "first 10 records" in text_of(shown)


def test_the_preview_speaks_chinese(tmp_path, tokenizer, monkeypatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    path = write_jsonl(tmp_path / "a.jsonl", alpaca(3))
    assert "参与训练的词元" in text_of(preview(recipe(tmp_path, str(path)), tokenizer))


def made(**settings) -> Recipe:
    objective = settings.pop("objective", "sft")
    return Recipe.model_validate({"model": "m", "objective": objective, "data": {"train": "x", **settings}})


def test_mask_check() -> None:
    nothing = Counts(records=5, samples=5, pieces=5, tokens=100, trained_tokens=0)
    everything = Counts(records=5, samples=5, pieces=5, tokens=100, trained_tokens=95)  # the first token of a piece is never a label
    answers = Counts(records=5, samples=5, pieces=5, tokens=100, trained_tokens=94)
    for recipe_ in (made(), made(objective="pretrain")):
        with pytest.raises(UserError, match="no token"):
            check_mask(nothing, recipe_)
    with pytest.raises(UserError, match="every token"):
        check_mask(everything, made())
    check_mask(answers, made())
    check_mask(everything, made(objective="pretrain"))
    check_mask(everything, made(objective={"kind": "sft", "train_on": "all"}))
    check_mask(nothing, made(mask_check=False))
    check_mask(everything, made(mask_check=False))


def test_plain_text_under_sft_is_refused(tmp_path, tokenizer) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "The fox. " * n} for n in range(1, 30)])
    made_ = recipe(tmp_path, str(path))
    with pytest.raises(UserError, match="every token would be trained"):
        check_mask(open_data(made_, tokenizer).counts, made_)

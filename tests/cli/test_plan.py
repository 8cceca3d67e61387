"""`ascendfactory plan` as a person uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unicodedata import east_asian_width

import pytest

from ascendfactory import cli
from ascendfactory.backends import BACKENDS
from ascendfactory.core.measured import read_measurements
from ascendfactory.core.plan import Plan
from tests.cli.test_train import CONFIG, Pretending

RECIPE = "model: qwen3-32b\ndata: {train: d.jsonl, seq_len: 4096}\nbatch: 64\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    (tmp_path / "big.yaml").write_text(RECIPE, encoding="utf-8")
    return "big.yaml"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(["plan", *words]) == 0
    return capsys.readouterr().out


def test_what_people_see(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, file, "--devices", "4x8 snt9b", "--top", "2", "--model=mixtral-8x7b")
    for part in ("4 x 8 snt9b: dp", "memory of", "activations", "predicted step", "matrix products", "tokens/s a device", "±", "next best"):
        assert part in text
    assert text.count("% mindspeed_llm") == 2
    assert "passed over:" in text
    assert "to run it there, write backend: mindspeed_llm" in text


def test_the_same_in_chinese(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    text = told(capsys, file, "--devices", "4x8 snt9b", "--layout", "tp=8,pp=2", "--model=mixtral-8x7b")
    for part in ("激活", "预测单步时间", "矩阵乘", "次优方案", "未选用", "级", "原因", "不用它的最优布局"):
        assert part in text
    assert not re.search("[a-z]{2,} [a-z]{2,} [a-z]{2,}", re.sub("'[^']*'", "", text))  # no English sentence is left


@pytest.mark.parametrize("language", ["en_US.UTF-8", "zh_CN.UTF-8"])
def test_a_screen_of_100_columns_holds_it(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, language: str
) -> None:
    monkeypatch.setenv("LC_ALL", language)
    monkeypatch.setenv("COLUMNS", "100")
    for words in (["--devices=4x8 snt9b"], ["--devices=snt9b", "--min-devices"]):
        for line in told(capsys, file, *words).splitlines():
            assert sum(1 + (east_asian_width(letter) in "WF") for letter in line.rstrip()) <= 100 or line.startswith("· ")


def test_reasons_come_in_both_languages(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(told(capsys, file, "--devices", "2x8 snt9b", "--json"))
    for line in [*plan["why"], plan["prediction"]["basis"]]:
        assert not re.search("[一-鿿]", line["en"])
        assert re.search("[一-鿿]", line["zh"])
    assert any(line["en"].startswith("tp 4: the best without it takes") for line in plan["why"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layout=tp=3"], ["layout.tp"]),  # the first of several reasons: its fix heeds them all
        (["--layout=pp=3"], ["layout.pp", "layout.dp"]),
        (["--layout=dp=3,tp=2"], ["layout.dp"]),
    ],
)
def test_only_what_is_written_is_blamed(file: str, capsys: pytest.CaptureFixture[str], words: list[str], line: list[str]) -> None:
    assert cli.run(["plan", file, "--devices=2x8 snt9b", "--backend=mindspeed_llm", *words]) == 2
    told_of = [told.removeprefix("error: ").partition(":")[0] for told in capsys.readouterr().err.splitlines()]
    assert told_of == line


def test_more_devices_than_a_machine_has_are_remarked(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 'machines with snt9b usually have 8: for 8 of them write "8x8 snt9b"' in told(capsys, file, "--devices=64 snt9b")
    assert "usually have" not in told(capsys, file, "--devices=8x8 snt9b")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--top=-1"], "--top: -1 is below 0; write 0 or more"),
        (["--min-devices", "--json"], "--json: does not go with --min-devices, which makes no plan; leave one out"),
        (["--min-devices", "--table"], "--min-devices: does not go with --table, which makes no plan; leave one out"),
        (["--json", "--simulate"], "--simulate: prints a table, and --json a plan; leave one out"),
    ],
)
def test_options_that_would_be_ignored_are_errors(file: str, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert cli.run(["plan", file, *words]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_json_is_the_plan(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.model_validate(json.loads(told(capsys, file, "--devices", "2x8 snt9b", "--json")), strict=False)
    assert plan.cluster.num_devices == 16
    assert plan.prediction is not None


def test_one_layout_is_priced(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(told(capsys, file, "--devices=2x8 snt9b", "--layout=tp=8,pp=2,vpp=1", "--json"))
    assert [plan["layout"][name] for name in ("tp", "pp", "vpp", "dp")] == [8, 2, 1, 1]


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ("tq=8", "--layout: 'tq=8' is no part of a layout; did you mean 'tp=...'? such as tp=8,pp=2"),
        ("tp", "--layout: 'tp' is no part of a layout; did you mean 'tp=...'? such as tp=8,pp=2"),
    ],
)
def test_a_mistaken_layout_is_told(file: str, capsys: pytest.CaptureFixture[str], layout: str, line: str) -> None:
    assert cli.run(["plan", file, f"--layout={layout}"]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_layout_that_does_not_fit_is_refused_with_its_fix(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", file, "--devices=2x8 snt9b", "--layout=tp=16", "--backend=mindspeed_llm"]) == 2
    err = capsys.readouterr().err
    assert "layout.tp: a tp group must lie inside a node, and tp 16 does not divide its 8 devices; write tp: 8" in err


def test_fewest_devices(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, file, "--devices=snt9b", "--min-devices").splitlines()
    assert any(line.startswith("mindspeed_llm") and "2x8 snt9b" in line for line in lines)
    assert "· verl: sft is left to other back ends; write backend: auto" in lines


def test_no_number_of_devices_is_enough_or_allowed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", file, "--devices=snt9b", "--min-devices", "--backend=verl"]) == 2
    line = "error: cluster: verl: sft is left to other back ends; write backend: auto\n"
    assert capsys.readouterr().err == line


def test_the_table_of_one_model(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "qwen3-0.6b", "--table")
    assert "Qwen3-0.6B" in text
    assert "whole node: the published table rounds up to 8" in text


def test_the_table_of_the_model_of_a_recipe(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    text = told(capsys, file, "--table")
    assert "Qwen3-32B" in text
    assert "整机：已公布的表向上取到 8" in text
    assert "未见 verl 以 sft_full 训练 Qwen3-32B 的记录" in text


def test_a_run_is_measured_and_the_next_plan_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "r.yaml").write_text("model: ./m\ndata: d.jsonl\ncluster: cpu\n")
    monkeypatch.setitem(BACKENDS, "native", Pretending("train"))
    assert "own runs" not in told(capsys, "r.yaml")
    assert cli.run(["train", "r.yaml"]) == 0
    (row,) = read_measurements(tmp_path / "runs" / "measured.jsonl")
    assert row.step_s > 0
    assert row.predicted_step_s is not None
    capsys.readouterr()
    assert "1 of your own runs" in told(capsys, "r.yaml")
    assert cli.run(["runs", "show", "r"]) == 0
    assert "step_s (predicted)" in capsys.readouterr().out


def test_the_schema_of_plans_names_every_part(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schema", "--plan"]) == 0
    schema = json.loads(capsys.readouterr().out)
    plan = json.loads(told(capsys, file, "--devices=2x8 snt9b", "--json"))
    assert set(plan) == set(schema["properties"])
    assert set(plan["layout"]) == set(schema["$defs"]["Layout"]["properties"])
    assert set(schema["required"]) <= set(plan)

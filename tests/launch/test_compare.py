"""`ascendfactory compare` with two engines that only say what they are told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendfactory import cli
from ascendfactory.backends import BACKENDS
from ascendfactory.backends.llamafactory import LlamaFactory
from ascendfactory.core.plan import Job, Plan
from tests.cli.test_train import CONFIG

FAKE = str(Path(__file__).parent / "fake_rows.py")
STEPS = [(3.0, 1.0, 1e-4), (2.5, 0.9, 2e-4), (2.2, 0.8, 1e-4)]
ROWS = [{"step": s, "ids": [5, 6, 7, 8], "trained": [0, 0, 1, 1], "num_items": 4} for s in (1, 2, 3) for _ in range(2)]


class Telling(LlamaFactory):
    """LLaMA-Factory's refusals and lines, with a program that tells a story."""

    def __init__(self, name: str, story: dict[str, Any]) -> None:
        self.name, self.story = name, story

    def render(self, plan: Plan) -> Job:
        argv = [sys.executable, FAKE, f"{plan.run_dir}/job/story.json"]
        return Job(files={"plan.json": plan.model_dump_json(), "job/story.json": json.dumps(self.story)}, argv=argv)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "r.yaml").write_text("model: ./m\ndata: {train: d.jsonl, seq_len: 64}\ncluster: 1 cpu\nbatch: 2\n")
    return tmp_path


def tell(monkeypatch: pytest.MonkeyPatch, name: str, steps: Any = STEPS, rows: Any = ROWS, code: int = 0) -> None:
    monkeypatch.setitem(BACKENDS, name, Telling(name, {"steps": steps, "rows": rows, "code": code}))


def run(*words: str) -> int:
    return cli.run(["compare", "r.yaml", "--steps=3", *words])


def said(here: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    made = json.loads((here / "runs" / "compare-r" / "compare.json").read_text())
    return made, {item["name"]: (item["state"], item["found"]["en"]) for item in made["checks"]}


def test_engines_that_agree(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", [(loss + 9e-4, norm * 1.005, lr) for loss, norm, lr in STEPS])
    assert run() == 0
    made, checks = said(here)
    assert made["agree"] and "parting" not in made
    assert {state for state, _ in checks.values()} == {"same"}
    assert list(checks) == ["packing", "tokens", "mask", "normalisation", "learning rate", "dtype", "optimizer"]
    out = capsys.readouterr().out
    assert "native and llamafactory agree in 3 steps (loss within 0.001)" in out
    assert "2.50000" in out and "-9.0e-04" in out and "report: runs/compare-r/compare.html" in out
    page = (here / "runs" / "compare-r" / "compare.html").read_text()
    assert page.count("<polyline") == 4 and "agree in 3 steps" in page
    recipe = Plan.model_validate_json((here / "runs/compare-r/native/plan.json").read_text(), strict=False).recipe
    assert not recipe.data.shuffle and recipe.data.packing == "dynamic" and recipe.backend == "native"
    assert run() == 0  # again: earlier runs are replaced
    names = {path.name for path in (here / "runs" / "compare-r").iterdir()}
    assert names == {"compare.html", "compare.json", "llamafactory", "measured.jsonl", "native"}


def test_the_first_step_that_differs(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", [STEPS[0], (2.502, 0.9, 2e-4), STEPS[2]])
    assert run() == 1
    made, checks = said(here)
    assert made["parting"] == {"step": 2, "what": "loss", "values": [2.5, 2.502]}
    assert checks["optimizer"][0] == "differs"
    assert "they part at step 2: loss 2.5 / 2.502" in capsys.readouterr().out
    assert run("--tolerance=0.01") == 0


def test_gradient_norms_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", [(3.0, 1.02, 1e-4), *STEPS[1:]])
    assert run() == 1
    assert said(here)[0]["parting"] == {"step": 1, "what": "grad_norm", "values": [1.0, 1.02]}


def changed(number: int, **facts: Any) -> list[dict[str, Any]]:
    return [row | facts if i == number else row for i, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("rows", "name", "words"),
    [
        (changed(2, ids=[5, 9, 7, 8]), "tokens", "step 2: template or tokenizer differs at token 1: native [5, 6, 7, 8]"),
        (changed(3, ids=[5, 6, 7]), "tokens", "(4 / 3 tokens)"),
        (changed(0, ids=[*range(64)], trained=[1] * 64), "tokens", "a sample longer than seq_len is cut differently from token 0 on"),
        (changed(1, trained=[0, 1, 1, 1]), "mask", "step 1: llamafactory trains token 1 of a row (id 6), native does not"),
        (ROWS[:1] + ROWS[2:], "packing", "step 1 has 2 rows on native, 1 on llamafactory"),
        ([row | {"num_items": None} for row in ROWS], "normalisation", "llamafactory averages the micro-batches"),
        ([row | {"num_items": 6} for row in ROWS], "normalisation", "llamafactory divides by 6, and trains 4 tokens"),
    ],
)
def test_causes_are_found_in_the_rows(here: Path, monkeypatch: pytest.MonkeyPatch, rows: Any, name: str, words: str) -> None:
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", [(loss + 1, norm, lr) for loss, norm, lr in STEPS], rows)
    assert run() == 1
    state, found = said(here)[1][name]
    assert state == "differs" and words in found


def test_only_the_order_of_steps_counts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [row | {"ids": [5, 6, 7, 8 + i]} for i, row in enumerate(ROWS)]
    tell(monkeypatch, "native", rows=own)
    tell(monkeypatch, "llamafactory", rows=[own[1], own[0], *own[2:]])
    assert run() == 0
    assert said(here)[1]["tokens"] == ("same", "the same in 3 steps")
    moved = [own[2] | {"step": 1}, own[1], own[0] | {"step": 2}, *own[3:]]
    tell(monkeypatch, "llamafactory", rows=moved)
    assert run() == 0
    assert said(here)[1]["tokens"] == ("differs", "the same rows, in other steps: the order of samples")


def test_an_engine_that_tells_no_rows(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", [(3.0, 1.0, 2e-4), *STEPS[1:]], rows=None)
    assert run("--tuning=lora") == 0
    checks = said(here)[1]
    assert checks["tokens"] == ("unknown", "not checked: llamafactory does not tell its rows")
    assert checks["learning rate"] == ("differs", "step 1: native 0.0001, llamafactory 0.0002")
    assert checks["first adapters"][0] == "differs"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--backends=native"], "--backends: name two: native,llamafactory; not 1"),
        (["--backends=native,native"], "--backends: name two back ends, not native twice"),
        (["--backends=native,lamafactory"], "--backends: no back end 'lamafactory'; write llamafactory"),
        (["--steps=0"], "--steps: write 1 or more, and a tolerance of 0 or more"),
        (["--objective=dpo", "--data.packing=dynamic"], "objective: 'dpo' is not yet in this release"),
    ],
)
def test_what_the_person_can_mend(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    assert run(*words) == 2
    assert line in capsys.readouterr().err
    assert not (here / "runs").exists()


def test_a_run_that_fails_is_told(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", code=1)
    assert run() == 2
    assert "llamafactory: its run ended with code 1; see runs/compare-r/llamafactory/logs" in capsys.readouterr().err


def test_it_speaks_chinese(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    tell(monkeypatch, "native")
    tell(monkeypatch, "llamafactory", [STEPS[0], (2.502, 0.9, 2e-4), STEPS[2]])
    assert run() == 1
    assert "自第 2 步起不一致：loss 2.5 / 2.502" in capsys.readouterr().out

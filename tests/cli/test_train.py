"""`ascendfactory train` from recipe to report, with a program that only pretends to train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ascendfactory import cli
from ascendfactory.backends import BACKENDS
from ascendfactory.backends.native import Native
from ascendfactory.core.plan import Job, Plan

FAKE = str(Path(__file__).parents[1] / "launch" / "fake_engine.py")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


class Pretending(Native):
    """The native back end with another program."""

    def __init__(self, what: str) -> None:
        self.what = what

    def render(self, plan: Plan) -> Job:
        return super().render(plan).model_copy(update={"argv": [sys.executable, FAKE, self.what, f"{plan.run_dir}/plan.json"]})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "r.yaml").write_text("model: ./m\ndata: d.jsonl\ncluster: cpu\n")
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setitem(BACKENDS, "native", Pretending(what))


def test_a_run_leaves_everything_and_says_where(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, "train")
    assert cli.run(["train", "r.yaml", "--optim.lr=3e-5", "--output.log_every=2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown[:3]] == [["1/3", "loss", "3.0000"], ["2/3", "loss", "1.5000"], ["3/3", "loss", "1.0000"]]
    assert shown[3:] == ["report: runs/r/report.html", "model: runs/r/export", "talk to it: ascendfactory chat runs/r/export"]
    run = here / "runs" / "r"
    assert {"recipe.yaml", "plan.json", "job", "logs", "metrics.jsonl", "report.html", "loss.png"} <= {p.name for p in run.iterdir()}
    assert Plan.model_validate_json((run / "plan.json").read_text()).recipe.optim.lr == 3e-5
    assert cli.run(["runs", "show", "r"]) == 0
    assert "3/3" in capsys.readouterr().out


def test_a_failing_run_hands_on_its_code_and_words(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, "user_error")
    assert cli.run(["train", "r.yaml"]) == 2
    assert capsys.readouterr().err == "error: data.train: no such file a.jsonl\n"
    pretend(monkeypatch, "crash")
    assert cli.run(["train", "r.yaml"]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[-2:] == [
        "  | RuntimeError: the weights ran away",
        "error: training ended with code 1; the whole log: runs/r/logs/attempt-1.log",
    ]


def test_a_plan_is_repeated_without_its_recipe(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch, "train")
    assert cli.run(["plan", "r.yaml", "--json"]) == 0
    (here / "plan.json").write_text(capsys.readouterr().out)
    (here / "r.yaml").unlink()
    assert cli.run(["train", "plan.json"]) == 0
    assert (here / "runs" / "r" / "report.html").exists()

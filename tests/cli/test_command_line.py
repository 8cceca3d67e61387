"""The command line: quick, and every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ascendfactory import cli
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Plan
from ascendfactory.launch.runs import create_run
from tests.examples import make
from tests.launch.test_runs import write_steps

RECIPE = "model: smollm2-135m\ndata: d.jsonl\ncluster: cpu\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What a command that the person must mend says."""
    assert cli.run(list(words)) == 2
    return capsys.readouterr().err.splitlines()


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tran", "r.yaml"], "no command 'tran'; did you mean 'ascendfactory train'?"),
        (["plan", "q.yaml"], "q.yaml: no such recipe file; did you mean 'r.yaml'?"),
        (["plan", "zzz"], "zzz: no such recipe file; 'ascendfactory config' writes one"),
        (["train", "r.yaml", "--dryrun"], "--dryrun: no such option; did you mean '--dry-run'?"),
        (["plan", "r.yaml", "--lr=1"], "lr: unknown key here; did you mean 'optim.lr'?"),
        (["plan", "r.yaml", "--seed"], "--seed: needs a value: --seed=..."),
        (["plan", "r.yaml", "zzz"], "zzz: unexpected; settings are written such as --optim.lr=1e-5"),
        (
            ["plan", "r.yaml", "--objective=ppo"],
            "objective: 'ppo' is not yet in this release of the embedded engine; pretrain and sft work",
        ),
        (["plan"], "Missing argument 'recipe'; see 'ascendfactory plan --help'"),
        (["runs", "foo"], "No such command 'foo'; see 'ascendfactory runs --help'"),
        (["runs", "list"], "runs: no runs here; 'ascendfactory train RECIPE' makes one"),
        (["export", "a", "b", "--dtype=bf16"], "--dtype: 'bf16' is none of auto, float32, bfloat16, float16; did you mean bfloat16?"),
        (["config", "--data", "d"], "--model: is missing; write it, or run in a terminal to be asked"),
        (["config", "--model", "m", "--tuning", "lorra"], "--tuning: 'lorra' is none of full, lora; did you mean lora?"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, *words) == [f"error: {line}"]


def test_every_mistake_of_a_recipe_has_its_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "plan", "r.yaml", "--optim.lr=x", "--sed=3") == [
        'error: optim.lr: "x" does not fit; it should be a number above 0',
        "error: sed: unknown key; did you mean 'seed'?",
    ]


def test_a_name_of_the_catalogue_cannot_be_trained_and_says_how_to_get_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(capsys, "train", "r.yaml")
    assert "hf download HuggingFaceTB/SmolLM2-135M" in line
    assert not (here / "runs").exists()


def test_help_and_messages_follow_the_locale(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "show how a recipe will run" in said(capsys, "--help")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "查看配方将如何运行" in said(capsys)
    assert told(capsys, "tran") == ["错误: 没有命令 'tran'，是否想用 'ascendfactory train'？"]


def test_every_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        assert f"ascendfactory {verb}" in said(capsys, verb, "--help")


def test_a_plan_is_json_with_the_settings_over_the_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.model_validate_json(said(capsys, "plan", "r.yaml", "--json", "--tuning=lora", "--tuning.rank", "16", "--optim.lr=3e-4"))
    assert plan.recipe.tuning.model_dump()["rank"] == 16
    assert (plan.recipe.optim.lr, plan.recipe.name, plan.run_dir) == (3e-4, "r", "runs/r")
    assert plan.backend == "native"
    assert sum(term.num_bytes for term in plan.memory) > 2**28


def test_a_dry_run_shows_plan_and_command_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "train", "r.yaml", "--dry-run")
    assert "SmolLM2-135M" in out
    assert "-m ascendfactory.engine runs/r/plan.json" in out
    assert sorted(p.name for p in here.iterdir()) == ["r.yaml"]


@pytest.mark.parametrize("objective", ["sft", "pretrain"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_starter_recipe_is_commented_and_loads(objective: str, tuning: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "--model", "smollm2-135m", "--data", "a b: c.jsonl", "--objective", objective, "--tuning", tuning]
    assert "next: ascendfactory plan s.yaml" in said(capsys, *words, "--output", "s.yaml")
    text = (here / "s.yaml").read_text()
    recipe = load_recipe(text)
    assert (recipe.objective.kind, recipe.tuning.kind, recipe.data.train[0].path) == (objective, tuning, "a b: c.jsonl")
    assert recipe.name == f"smollm2-135m_{objective}-{tuning}"
    assert text.count("#") > 10
    assert told(capsys, *words, "--output", "s.yaml") == ["error: s.yaml: is already there; write another --output"]
    said(capsys, "plan", "s.yaml", "--json")


def test_a_starter_recipe_can_be_printed_in_chinese(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    text = said(capsys, "config", "--model", "m", "--data", "d", "--output", "-")
    assert "训练结果写入" in text
    load_recipe(text)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, "schema"))["title"] == "AscendFactory recipe"


def test_runs_are_listed_shown_and_compared(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lr in (("a", "1e-5"), ("b", "2e-5")):
        write_steps(create_run(make(f"runs/{name}", f"--optim.lr={lr}")), 1, 2, eval_loss=2.5)
    listed = said(capsys, "runs", "list")
    assert "Tiny" in listed
    assert "2/4" in listed
    assert "2.5000" in listed
    shown = said(capsys, "runs", "show", "a")
    assert "optim.lr" in shown
    assert "1e-05" in shown
    compared = said(capsys, "runs", "diff", "a", "b")
    assert "1e-05" in compared
    assert "2e-05" in compared
    assert "optim.beta1" not in compared


def test_a_plan_file_is_run_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "plan.json").write_text(make("runs/x").model_dump_json())
    assert "runs/x/plan.json" in said(capsys, "train", "plan.json", "--dry-run")
    assert told(capsys, "train", "plan.json", "--seed=3") == ["error: --seed=3: a plan is run as it is; change the recipe instead"]


@pytest.mark.parametrize(
    "words",
    [["--help"], ["models"], ["backends"], ["plan", "r.yaml"], ["config", "--model", "m", "--data", "d", "--output", "-"], ["schema"]],
    ids=lambda words: words[0],
)
def test_the_quick_verbs_need_neither_torch_nor_much_time(words: list[str], here: Path) -> None:
    code = (
        "import sys, resource; from ascendfactory.cli import run; code = run(sys.argv[1:]); sys.stdout.flush();"
        "late = ('torch', 'transformers', 'matplotlib', 'rich.markdown') + (() if sys.argv[1] == 'plan' else ('numpy',));"
        "heavy = [m for m in late if m in sys.modules];"
        "sys.stderr.write(str(heavy)); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == "[]"
    # Measured 0.1 to 0.55 s; the bound leaves room for a slow or busy machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_a_defect_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda argv: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.run(["plan"])


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupt)
    assert cli.run(["plan"]) == 130

"""Run folders: made, continued, kept apart, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.core.load import load_recipe
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan
from ascendfactory.launch.runs import create_run, diff_runs, flatten, list_runs, load_run, read_metrics, results_of, run_dir_of
from tests.examples import make


def write_steps(folder: Path, *steps: int, num_steps: int = 4, **facts: Any) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            line = {"step": step, "num_steps": num_steps, "loss": 4.0 / step, "lr": 1e-5, "grad_norm": 1.0, "label_tokens": 5, "tokens": 10}
            line |= {"epoch": 0.1 * step, "step_s": 0.5, "tokens_per_s": 20.0, "memory_bytes": 2**30, **facts}
            file.write(json.dumps(line) + "\n")


def checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)


def test_a_run_folder_holds_what_repeats_the_run(tmp_path: Path) -> None:
    plan = make(tmp_path / "a", "--optim.lr=3e-5")
    folder = create_run(plan)
    assert Plan.model_validate_json((folder / "plan.json").read_text()) == plan
    assert load_recipe((folder / "recipe.yaml").read_text()) == plan.recipe
    assert load_run(folder).plan == plan


def test_the_folder_is_named_by_the_recipe() -> None:
    assert run_dir_of(load_recipe("model: m\ndata: d\nname: x")) == "runs/x"
    assert run_dir_of(load_recipe("model: m\ndata: d\noutput: here")) == "here"


def test_the_same_model_and_data_are_continued(tmp_path: Path) -> None:
    checkpoint(create_run(make(tmp_path / "a")))
    folder = create_run(make(tmp_path / "a", "--optim.lr=1", "--duration=9 epochs", "--batch=16"))
    assert load_run(folder).plan.recipe.optim.lr == 1.0
    assert (folder / "checkpoints").exists()


def test_checkpoints_of_another_recipe_are_refused_by_the_keys_that_differ(tmp_path: Path) -> None:
    folder = create_run(make(tmp_path / "a"))
    create_run(make(tmp_path / "a", "--tuning=lora"))  # nothing saved yet: nothing to mix up
    create_run(make(tmp_path / "a", "--tuning=lora", "--tuning.rank=4"))
    checkpoint(folder)
    with pytest.raises(UserError) as caught:
        create_run(make(tmp_path / "a", "--tuning=lora", "--tuning.rank=8", "--tuning.dropout=0.1", "--optim.lr=1", model="n"))
    assert caught.value.en == (
        "holds checkpoints of another recipe (model.path: m → n; tuning.rank: 4 → 8); "
        "write another output.dir or name, or checkpoint.resume: none"
    )


def test_another_kind_of_tuning_is_named_alone(tmp_path: Path) -> None:
    checkpoint(create_run(make(tmp_path / "a")))
    with pytest.raises(UserError, match=r"recipe \(tuning.kind: full → lora\); write"):
        create_run(make(tmp_path / "a", "--tuning=lora"))


def test_starting_over_keeps_the_earlier_run(tmp_path: Path) -> None:
    folder = create_run(make(tmp_path / "a"))
    write_steps(folder, 1)
    for kept in ("a-old-1", "a-old-2"):
        create_run(make(tmp_path / "a", "--checkpoint.resume=none"))
        assert (tmp_path / kept / "plan.json").exists()
    assert read_metrics(tmp_path / "a-old-1")
    assert not read_metrics(folder)


def test_a_checkpoint_of_the_folder_itself_is_continued_in_place(tmp_path: Path) -> None:
    folder = create_run(make(tmp_path / "a"))
    checkpoint(folder)
    create_run(make(tmp_path / "a", f"--checkpoint.resume={folder}/checkpoints/step-00000002"))
    assert (folder / "checkpoints" / "step-00000002").exists()


def test_metrics_of_a_resumed_run_count_once_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 2, 3)
    write_steps(tmp_path, 2, loss=9.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "num_')
    assert [(s.step, s.loss) for s in read_metrics(tmp_path)] == [(1, 4.0), (2, 9.0)]
    assert read_metrics(tmp_path / "nowhere") == []


def test_results_are_sums_and_means_over_the_run(tmp_path: Path) -> None:
    folder = create_run(make(tmp_path / "a"))
    write_steps(folder, 1, eval_loss=5.0)
    write_steps(folder, 2, eval_loss=3.0, memory_bytes=3 * 2**30)
    write_steps(folder, 4, eval_loss=3.5)
    assert results_of(load_run(folder)) == {
        "state": "planned",
        "steps": "4/4",
        "loss": 1.0,
        "eval_loss": 3.5,
        "best_eval_loss": 3.0,
        "tokens": 30,
        "tokens_per_s": 20,
        "peak_memory_gib": 3.0,
        "time_s": 1.5,
    }


def test_two_runs_differ_by_their_settings_and_results(tmp_path: Path) -> None:
    one, two = create_run(make(tmp_path / "a")), create_run(make(tmp_path / "b", "--optim.lr=2e-5", "--tuning=lora", nproc=2))
    write_steps(one, 4)
    settings, results = diff_runs(load_run(one), load_run(two))
    assert ("optim.lr", "1e-05", "2e-05") in settings
    assert ("tuning.kind", "full", "lora") in settings
    assert ("tuning.rank", "-", "8") in settings
    assert ("plan.layout.dp", "1", "2") in settings
    assert not [row for row in settings if row[1] == row[2]]
    assert ("loss", "1.0", "-") in results


def test_runs_are_listed_newest_first_and_damaged_ones_left_out(tmp_path: Path) -> None:
    for name, started_s in (("old", 1.0), ("new", 2.0)):
        folder = create_run(make(tmp_path / name))
        (folder / "job").mkdir()
        (folder / "job" / "status.json").write_text(json.dumps({"state": "finished", "started_s": started_s}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "plan.json").write_text("{")
    assert [(run.dir.name, run.state) for run in list_runs(tmp_path)] == [("new", "finished"), ("old", "finished")]


def test_a_name_finds_the_run_and_a_wrong_one_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    create_run(make("runs/first"))
    assert load_run("first").dir == Path("runs/first")
    with pytest.raises(UserError, match="did you mean 'first'"):
        load_run("frist")
    (tmp_path / "runs" / "first" / "plan.json").write_text('{"version": 9}')
    with pytest.raises(UserError, match="is not a plan of this version"):
        load_run("first")


def test_settings_are_flattened_to_dotted_keys() -> None:
    tree = {"a": {"b": 1, "c": [{"d": 2}, {"d": 3}]}, "e": [1, 2], "f": {}}
    assert flatten(tree) == {"a.b": 1, "a.c.0.d": 2, "a.c.1.d": 3, "e": [1, 2], "f": {}}

"""One process of several is killed: the run ends everywhere within half a minute, says who was lost and where, leaves nothing behind,
and goes on by itself where the recipe allows a restart."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan, StepMetrics
from ascendfactory.engine.checkpoint import verify
from ascendfactory.launch.start import start
from tests.runs import make_tiny_plan, train
from tests.tiny import write_chats

pytestmark = pytest.mark.parallel

SPLIT = {"tp": 2, "pp": 2}
ONE_BY_ONE = {"global_size": 4, "micro_size": 1}


def plan_for(model: str, tmp: Path, name: str, nproc: int, **settings: Any) -> Plan:
    data = tmp / "chats.jsonl"
    if not data.exists():
        write_chats(data, 60)
    settings = {"duration": "5 steps", "batch": ONE_BY_ONE, "checkpoint": {"every": "1 steps", "keep": 2}} | settings
    return make_tiny_plan(model, str(data), str(tmp / name), nproc=nproc, **settings)


def ranks_of(run_dir: str) -> dict[int, psutil.Process]:
    """The living processes of a run by rank; -1 is torchrun."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and any(word.startswith(run_dir) for word in words):
                found[-1 if "torch.distributed.run" in words else int(process.environ()["RANK"])] = process
        except (psutil.Error, KeyError):  # it ended while we looked, or is a child of the data loader
            continue
    return found


class Killer:
    """Kills a rank, once, when a step is reported; remembers when, and all that is told."""

    def __init__(self, plan: Plan, rank: int, at_step: int) -> None:
        self.plan, self.rank, self.at_step = plan, rank, at_step
        self.killed_s = self.told_s = 0.0
        self.losses: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []

    def step(self, step: StepMetrics) -> None:
        self.losses[step.step] = step.loss
        if step.step == self.at_step and not self.killed_s:
            ranks_of(self.plan.run_dir)[self.rank].kill()
            self.killed_s = time.monotonic()

    def note(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["kind"] == "failed":
            self.told_s = time.monotonic()  # a report of the run is written after

    def event(self, kind: str) -> dict[str, Any]:
        return next(event for event in self.events if event["kind"] == kind)


def losses_alone(model: str, tmp: Path) -> dict[int, float]:
    """The same training in one process, uninterrupted."""
    return {step.step: step.loss for step in train(plan_for(model, tmp, "alone", 1).model_dump_json())}


def test_a_killed_rank_is_named_and_nothing_is_left_but_a_good_run_folder(tiny_models: dict[str, str], tmp_path: Path) -> None:
    plan = plan_for(tiny_models["llama"], tmp_path, "run", 4, layout=SPLIT, duration="100000 steps")
    killer = Killer(plan, rank=2, at_step=3)
    code = start(plan, on_step=killer.step, on_event=killer.note)
    assert 0 < killer.told_s - killer.killed_s < 30
    assert code == 128 + signal.SIGKILL
    assert ranks_of(plan.run_dir) == {}
    told = killer.event("failed")
    assert told["rank"] == 2
    place = json.loads((tmp_path / "run" / "logs" / "position-rank2.json").read_text())
    assert place["step"] >= 3
    assert told["text_en"].startswith("rank 2 killed: most often the machine ran out of memory; it was at the ")
    assert f" of step {place['step']}; the whole log: " in told["text_en"]
    assert f"当时处于第 {place['step']} 步的" in told["text_zh"]
    assert told["lines"] == []  # what the other ranks said of it is in the log
    folders = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert folders
    for folder in folders:
        verify(folder)


def test_a_restart_goes_on_by_itself_with_the_same_losses(tiny_models: dict[str, str], tmp_path: Path) -> None:
    restarts = {"device": "cpu", "restarts": 1}
    plan = plan_for(
        tiny_models["llama"], tmp_path, "run", 2, layout={"tp": 2}, cluster=restarts, checkpoint={"every": "1 steps", "resume": "none"}
    )
    killer = Killer(plan, rank=1, at_step=3)
    assert start(plan, on_step=killer.step, on_event=killer.note) == 0
    kinds = [event["kind"] for event in killer.events]
    assert kinds.index("restart") < kinds.index("resumed")
    assert "failed" not in kinds
    assert killer.event("restart")["text_en"].startswith("rank 1 killed: ")
    assert killer.event("restart")["text_en"].endswith("; starting again from the newest checkpoint")
    alone = losses_alone(tiny_models["llama"], tmp_path)
    assert killer.losses == pytest.approx(alone, rel=1e-5)
    kept = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in kept] == [1, 2, 3, 4, 5]
    assert [step["loss"] for step in kept] == pytest.approx(list(alone.values()), rel=1e-5)


def test_wrong_input_is_not_tried_again(tiny_models: dict[str, str], tmp_path: Path) -> None:
    restarts = {"device": "cpu", "restarts": 3}
    plan = plan_for(tiny_models["llama"], tmp_path, "run", 2, cluster=restarts, data={"train": str(tmp_path / "nothing.jsonl")})
    events: list[dict[str, Any]] = []
    assert start(plan, on_event=events.append) == 2
    assert [event["kind"] for event in events] == ["failed"]
    assert "nothing.jsonl" in events[0]["text_en"]
    assert not (tmp_path / "run").exists()


def test_a_restart_without_a_checkpoint_of_its_own_begins_where_the_recipe_said(
    tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ascendfactory.engine import trainer
    from ascendfactory.engine.build import build

    first = plan_for(tiny_models["llama"], tmp_path, "first", 1, duration="2 steps")
    train(first.model_dump_json())
    saved = tmp_path / "first" / "checkpoints" / "step-00000002"
    second = plan_for(tiny_models["llama"], tmp_path, "second", 1, checkpoint={"resume": str(saved)})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = build(second)
    trainer.start(run)
    assert run.step == 2
    run.reporter.close()


def test_a_lost_partner_is_no_full_disk(tmp_path: Path) -> None:
    """What ends a save decides who is at fault: only the disk is the person's to mend."""
    import torch

    from ascendfactory.engine.checkpoint import Checkpoints
    from ascendfactory.engine.mesh import Mesh

    checkpoints = Checkpoints(tmp_path, Mesh(torch.device("cpu")), keep=1, asynchronous=True)
    for error, kind in ((RuntimeError("Connection closed by peer"), RuntimeError), (OSError(28, "No space left on device"), UserError)):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        checkpoints._pending = checkpoints._writer.submit(fail)
        with pytest.raises(kind, match="could not be written"):
            checkpoints.wait()
    assert list(tmp_path.iterdir()) == []

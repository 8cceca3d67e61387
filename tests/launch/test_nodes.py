"""One job on several nodes: what is done once is done on node 0, and what happens on one node is known on all."""

from __future__ import annotations

import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ascendfactory.backends import BACKENDS
from ascendfactory.core.plan import Job, Step, StepMetrics
from ascendfactory.launch.local import launch
from ascendfactory.launch.node import free_port
from ascendfactory.launch.place import Place
from ascendfactory.launch.preflight import differences
from ascendfactory.launch.team import Team
from ascendfactory.launch.watch import GRACE_S, LAST_WORDS_S, Watch, cause, lost_end
from tests.launch.test_launch_local import FAKE, alive


class Nodes:
    """Two launches of the same job, each with its team, as two machines would have them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[list[StepMetrics]] = [[], []]
        self.events: list[list[dict[str, Any]]] = [[], []]

    def run(self, words: str, **job: Any) -> list[int]:
        port = free_port()
        argv = [sys.executable, FAKE, words, str(self.folder / "mark"), "{node_rank}"]

        def node(rank: int) -> int:
            team = Team(Place(rank, 2, "127.0.0.1", port), "run", meet_s=20)
            try:
                return launch(
                    Job(files={}, argv=argv, **job),
                    self.folder / "run",
                    read_step=BACKENDS["native"].read_step,
                    on_step=self.steps[rank].append,
                    on_event=self.events[rank].append,
                    team=team,
                )
            finally:
                team.close()

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(node, range(2)))

    def event(self, kind: str) -> dict[str, Any]:
        return next(event for event in self.events[0] if event["kind"] == kind)


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def test_steps_and_events_of_all_nodes_come_to_the_first(nodes: Nodes) -> None:
    assert nodes.run("nothing,steps") == [0, 0]
    assert [step.step for step in nodes.steps[0]] == [1, 2, 3]  # node 1 printed them
    assert nodes.steps[1] == []
    assert nodes.event("exported")["text_en"] == "done"
    logs = nodes.folder / "run" / "logs"
    assert "a warning" in (logs / "attempt-1-node-1.log").read_text()
    assert "a warning" not in (logs / "attempt-1.log").read_text()


def test_a_failure_on_one_node_ends_the_job_on_all_and_is_named(nodes: Nodes) -> None:
    began_s = time.monotonic()
    assert nodes.run("stubborn,crash") == [1, 1]
    assert time.monotonic() - began_s < 20
    failed = nodes.event("failed")
    assert failed["node"] == 1
    assert failed["text_en"].startswith("node 1 (")
    assert failed["lines"][-1] == "RuntimeError: the weights ran away"
    assert failed["log"].endswith("attempt-1-node-1.log")
    assert not alive("stubborn,crash")


def test_wrong_input_on_one_node_is_a_user_error_everywhere_and_is_not_tried_again(nodes: Nodes) -> None:
    assert nodes.run("stubborn,user_error", restarts=3) == [2, 2]
    assert "data.train: no such file a.jsonl" in nodes.event("failed")["text_en"]
    assert not any(event["kind"] == "restart" for event in nodes.events[0])


def test_all_nodes_start_again_as_often_as_the_recipe_says(nodes: Nodes) -> None:
    assert nodes.run("polite,once", restarts=0) == [1, 1]
    (nodes.folder / "mark").unlink()
    nodes.events[0].clear()
    assert nodes.run("steps,once", restarts=1) == [0, 0]
    assert nodes.event("restart")["text_en"].endswith("; starting again from the newest checkpoint")
    assert {path.name for path in (nodes.folder / "run" / "logs").glob("attempt-*")} >= {"attempt-3.log", "attempt-3-node-1.log"}


def test_steps_before_and_after_run_on_the_first_node_only(nodes: Nodes) -> None:
    out = nodes.folder / "out"
    code = f"import os, pathlib; p = pathlib.Path({str(out)!r}) / 'made'; p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    step = Step(name="convert", argv=[sys.executable, "-c", code], output=str(out))
    after = step.model_copy(update={"name": "export", "output": str(nodes.folder / "out2"), "argv": [sys.executable, "-c", "print()"]})
    assert nodes.run("steps,steps", before=[step], after=[after]) == [0, 0]
    assert (out / "made").read_text() == "x"
    assert [event["step"] for event in nodes.events[0] if event["kind"] == "step"] == ["convert", "export"]


def test_a_failing_step_before_training_ends_all_nodes(nodes: Nodes) -> None:
    step = Step(name="convert", argv=[sys.executable, "-c", "raise SystemExit(3)"], output=str(nodes.folder / "out"))
    assert nodes.run("steps,steps", before=[step]) == [3, 3]
    assert nodes.steps == [[], []]


def test_a_node_that_vanishes_ends_the_job(tmp_path: Path) -> None:
    port = free_port()

    def vanish() -> None:
        team = Team(Place(1, 2, "127.0.0.1", port), "run", meet_s=20)
        team.gather("the folder is locked")
        time.sleep(1)
        team._links[0].close()  # no goodbye

    events: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(vanish)
        code = launch(
            Job(files={}, argv=[sys.executable, FAKE, "stubborn"], restarts=5),
            tmp_path,
            read_step=BACKENDS["native"].read_step,
            on_event=events.append,
            team=Team(Place(0, 2, "127.0.0.1", port), "run", meet_s=20),
        )
    assert code == 1
    assert [event["text_en"].split(":")[0] for event in events if event["kind"] == "failed"] == ["node 1 was lost"]


def end(code: int, **facts: Any) -> dict[str, Any]:
    return {"code": code, "killed": False, "signalled": False, "event": None, "host": "h", "order": []} | facts


@pytest.mark.parametrize(
    ("ends", "node"),
    [
        ([end(0), end(0)], None),
        ([end(130), end(0)], None),
        ([end(1, order=[2, 0]), end(1, killed=True), end(1)], 2),  # node 2 was the first that failed
        ([end(1, order=[0, 1]), end(137)], 1),  # killed by the system: the others failed because it was gone
        ([end(143, order=[0, 1]), end(1)], 0),  # SIGTERM is what torchrun sends to the rest: no cause by itself
        ([end(1, order=[0, 1]), end(2)], 1),
        ([lost_end(3)], 0),
    ],
)
def test_the_cause_among_the_ends(ends: list[dict[str, Any]], node: int | None) -> None:
    assert cause(ends) == node


def test_a_watch_without_other_nodes_does_nothing() -> None:
    watch = Watch(Team(Place()), lambda step: None, lambda event: None)
    watch.tick()
    assert watch.next_signal() is None
    assert not watch.is_time_to_kill()
    assert watch.settle(0) == [end(0, host=socket.gethostname())]


def test_a_rank_that_ends_after_a_signal_does_not_cut_the_save_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now_s = Watch(Team(Place()), lambda step: None, lambda event: None), [100.0]
    monkeypatch.setattr("ascendfactory.launch.watch.time.monotonic", lambda: now_s[0])
    watch.signals.append(signal.SIGTERM)
    assert watch.next_signal() == signal.SIGTERM
    watch.failing()  # torchrun reports a rank that SIGTERM ended; the first one is writing a checkpoint
    now_s[0] += GRACE_S + 1
    watch.tick()
    assert not watch.is_time_to_kill()
    watch.signals.append(signal.SIGINT)  # the person does not want to wait
    assert watch.next_signal() is None
    assert watch.is_time_to_kill()


def test_without_a_signal_the_others_are_killed_after_the_grace_and_the_failing_one_may_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now_s = Watch(Team(Place()), lambda step: None, lambda event: None), [100.0]
    monkeypatch.setattr("ascendfactory.launch.watch.time.monotonic", lambda: now_s[0])
    watch.failing()
    now_s[0] += GRACE_S + 1
    watch.tick()
    assert watch.must_kill and not watch.is_time_to_kill()
    now_s[0] += LAST_WORDS_S
    assert watch.is_time_to_kill()


FACTS: dict[str, Any] = {
    "host": "a",
    "problem": None,
    "version": "1.0",
    "python": "3.11",
    "packages": {"torch": "2.13.0", "numpy": "2"},
    "devices": "8 x Ascend910B",
    "model": "ab12",
    "data": "cd34",
    "shared": True,
    "free_bytes": 2**40,
}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"version": "0.9"}, "node 1 (b): AscendFactory 0.9, node 0 has 1.0; install the same version on every node"),
        (
            {"packages": {"torch": "2.12.0", "numpy": "2"}},
            'node 1 (b): packages {"torch": "2.12.0"}, node 0 has {"torch": "2.13.0"}; make the same environment on every node',
        ),
        ({"devices": "4 x Ascend910B"}, "node 1 (b): devices 4 x Ascend910B, node 0 has 8 x Ascend910B; take nodes with the same devices"),
        (
            {"model": "m missing"},
            "node 1 (b): model.path m missing, node 0 has ab12; keep the same folder on every node, or on a shared disk",
        ),
        ({"shared": False}, "node 1 (b): output.dir runs/x is not node 0's folder; put it on a disk that all nodes share"),
        ({"free_bytes": 2**28}, "node 1 (b): 0.25 GiB free at runs/x; free some space"),
        ({"problem": ["cluster: no device", "cluster：无设备"]}, "node 1 (b): cluster: no device"),
    ],
)
def test_nodes_that_do_not_fit_together_are_named_with_the_fix(changes: dict[str, Any], text: str | None) -> None:
    found = differences([FACTS, FACTS | {"host": "b"} | changes], "runs/x")
    assert [en for en, _ in found] == ([text] if text else [])

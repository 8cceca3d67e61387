"""Processes: followed, stopped, told about, and never left behind. No framework is needed for that."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ascendfactory import cli
from ascendfactory.backends import BACKENDS
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, StepMetrics
from ascendfactory.launch.local import launch
from ascendfactory.launch.watch import INTERRUPTED

FAKE = str(Path(__file__).with_name("fake_engine.py"))


class Seen:
    """Runs the fake engine and keeps what was reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[StepMetrics] = []
        self.events: list[dict[str, Any]] = []

    def run(self, *words: str, **job: Any) -> int:
        return launch(
            Job(files={"plan.json": "{}", "job/extra.txt": "x"}, argv=[sys.executable, FAKE, *words], **job),
            self.folder,
            read_step=BACKENDS["native"].read_step,
            on_step=self.steps.append,
            on_event=self.events.append,
        )

    def event(self, kind: str) -> dict[str, Any]:
        return next(e for e in self.events if e["kind"] == kind)

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "job" / "status.json").read_text()))


def alive(word: str) -> bool:
    """Whether a child of ours with this word on its command line still runs."""
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and word in child.cmdline():
                return True
        except psutil.Error:  # it ended while we looked
            continue
    return False


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    return Seen(tmp_path / "run")


def signal_when(ready: Any, *numbers: int) -> None:
    """Sends signals to this process, one each time `ready()` is true."""

    def wait() -> None:
        for number in numbers:
            deadline = time.monotonic() + 20
            while not ready(number) and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=wait, daemon=True).start()


def test_steps_and_events_are_handed_on_and_all_output_is_kept(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert seen.run("steps", nproc=64) == 0
    assert [(s.step, s.loss) for s in seen.steps] == [(1, 3.0), (2, 1.5), (3, 1.0)]
    assert seen.events == [{"kind": "exported", "text_en": "done", "text_zh": "完成"}]
    log = (seen.folder / "logs" / "attempt-1.log").read_text()
    assert "plain words\n1\n" in log  # 64 processes leave one thread for each
    assert "a warning" in log
    assert "@step" in log
    assert json.loads((seen.folder / "logs" / "events.jsonl").read_text()) == seen.events[0]
    assert (seen.folder / "job" / "extra.txt").read_text() == "x"
    assert json.loads((seen.folder / "job" / "job.json").read_text())["argv"][1:] == [FAKE, "steps"]
    assert (seen.status()["state"], seen.status()["exit_code"]) == ("finished", 0)


def test_a_second_attempt_has_a_log_of_its_own(seen: Seen) -> None:
    seen.run("steps")
    seen.run("user_error")
    assert sorted(p.name for p in (seen.folder / "logs").glob("*.log")) == ["attempt-1.log", "attempt-2.log"]
    assert seen.status()["state"] == "failed"


def test_the_environment_of_the_person_wins_over_a_default_but_not_over_the_job(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen.run("steps")
    seen.run("steps", env={"OMP_NUM_THREADS": "5"})
    assert [(seen.folder / "logs" / f"attempt-{n}.log").read_text().count(f"words\n{t}") for n, t in ((1, 3), (2, 5))] == [1, 1]


def test_a_user_error_is_its_own_line_and_nothing_else(seen: Seen) -> None:
    assert seen.run("user_error") == 2
    failed = seen.event("failed")
    assert (failed["text_en"], failed["lines"], failed["code"]) == ("data.train: no such file a.jsonl", [], 2)


def test_a_crash_shows_its_last_lines_and_where_the_log_is(seen: Seen) -> None:
    assert seen.run("crash") == 1
    failed = seen.event("failed")
    assert failed["lines"][-1] == "RuntimeError: the weights ran away"
    assert failed["text_en"] == f"training ended with code 1; the whole log: {seen.folder / 'logs' / 'attempt-1.log'}"


def test_a_killed_process_hints_at_memory(seen: Seen) -> None:
    assert seen.run("killed") == 137
    assert "out of memory" in seen.event("failed")["text_en"]
    assert "内存不足" in seen.event("failed")["text_zh"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_passed_on_and_the_job_ends_by_itself(seen: Seen, number: int) -> None:
    signal_when(lambda n: seen.steps, number)
    assert seen.run("polite") == 0
    assert seen.event("stopped")["text_en"] == f"saved after [{int(number)}]"
    assert seen.status()["state"] == "stopped"


def test_a_second_interrupt_kills(seen: Seen) -> None:
    signal_when(lambda n: seen.steps, signal.SIGINT, signal.SIGINT)
    began = time.monotonic()
    assert seen.run("stubborn") == INTERRUPTED
    assert time.monotonic() - began < 10
    assert [e["kind"] for e in seen.events] == ["signal"]


def test_the_handlers_of_before_are_put_back(seen: Seen) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen.run("steps")
    assert signal.getsignal(signal.SIGINT) is before


def test_processes_that_left_their_group_are_killed_and_do_not_hold_up_the_end(seen: Seen, tmp_path: Path) -> None:
    began = time.monotonic()
    assert seen.run("orphan", str(tmp_path / "pid")) == 0
    assert time.monotonic() - began < 10
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_error_in_a_callback_leaves_no_process(seen: Seen) -> None:
    def fail(step: StepMetrics) -> None:
        raise ValueError("from the caller")

    with pytest.raises(ValueError, match="from the caller"):
        launch(
            Job(files={}, argv=[sys.executable, FAKE, "stubborn"]),
            seen.folder,
            read_step=BACKENDS["native"].read_step,
            on_step=fail,
        )
    deadline = time.monotonic() + 5
    while alive("stubborn") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive("stubborn")


def test_two_launches_never_share_a_folder(seen: Seen) -> None:
    inner: list[str] = []

    def again(step: StepMetrics) -> None:
        try:
            launch(Job(files={}, argv=["true"]), seen.folder, read_step=lambda line: None)
        except UserError as error:
            inner.append(error.en)

    launch(Job(files={}, argv=[sys.executable, FAKE, "steps"]), seen.folder, read_step=BACKENDS["native"].read_step, on_step=again)
    assert len(inner) == 3
    assert inner[0].startswith("a run is going on in this folder")


def test_a_program_that_is_not_there_is_told(seen: Seen) -> None:
    with pytest.raises(UserError, match="cannot be started"):
        launch(Job(files={}, argv=["no-such-program"]), seen.folder, read_step=lambda line: None)


def test_a_full_disk_is_one_line_and_leaves_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "events.jsonl").symlink_to("/dev/full")  # every write there fails as on a full disk
    seen = Seen(tmp_path / "run")
    monkeypatch.setattr(cli, "_dispatch", lambda argv: seen.run("steps"))
    assert cli.run(["train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no space is left on the disk; free some, then run the same command again")
    assert len(said.splitlines()) == 1
    assert not alive("fake_engine.py")

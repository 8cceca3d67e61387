"""Runs a job: starts it on this machine, follows its output, passes signals on, leaves no process behind.

A job of several nodes is launched on each of them by the same call; `launch/team.py` keeps the launchers in touch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from ascendfactory.core.lines import read_event
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, Step, StepMetrics
from ascendfactory.launch.devices import usable_cpus
from ascendfactory.launch.environments import resolve
from ascendfactory.launch.failure import USER_ERROR, again, exit_code, failure_event, lost_rank, on_node, restart_event
from ascendfactory.launch.lock import held
from ascendfactory.launch.place import Place, interface_env
from ascendfactory.launch.steps import is_made, mark_made, prepare, step_fingerprint
from ascendfactory.launch.team import Team
from ascendfactory.launch.watch import INTERRUPTED, Event, Watch, cause

# Every process of a run carries this variable, so that those which left its process group are found as well:
# torchrun puts each rank in a session of its own.
RUN_VARIABLE = "ASCENDFACTORY_RUN"
RESTART_VARIABLE = "ASCENDFACTORY_RESTART"  # how often the launcher has started it again; the embedded engine asks
_NUM_KEPT_LINES = 400  # of stderr, for the summary of a failure
_POLL_S = 0.2
_DRAIN_S = 2.0  # how long output is still read once the process has ended


def launch(
    job: Job,
    run_dir: str | Path,
    *,
    read_step: Callable[[str], StepMetrics | None],
    on_step: Callable[[StepMetrics], None] = lambda step: None,
    on_event: Callable[[Event], None] = lambda event: None,
    team: Team | None = None,
    first: Job | None = None,
) -> int:
    """Runs the job to its end and returns its exit code.

    The first SIGINT or SIGTERM is passed to the job, which saves a checkpoint and ends; a second SIGINT kills it.
    Everything the job prints goes to `run_dir/logs/attempt-N.log` (other nodes: `attempt-N-node-R.log`), events also to
    `run_dir/logs/events.jsonl`. A job of several nodes is launched on each of them: steps and events of all come to node 0, which
    alone runs the steps before and after training; a signal or a failure on one node ends the job on all.

    Args:
        job: what to run. Its files are written into the run folder first.
        run_dir: the run folder, on a disk that all nodes share; made when missing.
        read_step: the back end's reader of its own output lines.
        on_step: called with each optimizer step, on node 0.
        on_event: called with each `@event` of the job, and with `signal` and `failed` events of the launcher, on node 0.
        team: the nodes; by default this machine alone.
        first: what must end well on all nodes before anything else: the check that they can talk to each other.

    Raises:
        UserError: when another launch is using the folder.
    """
    folder, team = Path(run_dir), team or Team(Place())
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder) if team.is_first else nullcontext():
        if team.is_first:
            _write_files(job, folder)
        with _reporter(folder, on_event) if team.is_first else _messenger(team) as tell:
            watch = Watch(team, on_step, tell)
            with watch.handling():
                for restarts_left in range(job.restarts, -1, -1):
                    log = team.gather(next_log(folder).name, watch.hear)[0]
                    follower = _Follower(read_step, on_step if team.is_first else partial(_tell_step, team), tell, folder, watch, job)
                    num_restarts = job.restarts - restarts_left
                    attempt = _Attempt(folder, log, follower, watch, tell if team.is_first else on_event, num_restarts)
                    code, is_over = attempt.run(job, first, restarts_left)
                    if is_over:
                        break
    return code


@contextmanager
def _reporter(folder: Path, on_event: Callable[[Event], None]) -> Iterator[Callable[[Event], None]]:
    """What node 0 does with events: keeps them, and tells the caller."""
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / "events.jsonl").open("a", encoding="utf-8") as events:

        def tell(event: Event) -> None:
            events.write(json.dumps(event, ensure_ascii=False) + "\n")
            events.flush()
            on_event(event)

        yield tell


@contextmanager
def _messenger(team: Team) -> Iterator[Callable[[Event], None]]:
    """What the other nodes do with events: they tell node 0."""
    yield lambda event: team.tell({"kind": "event", "event": event})


def _tell_step(team: Team, step: StepMetrics) -> None:
    team.tell({"kind": "step", "step": step.model_dump(exclude_none=True)})


class _Attempt:
    """One attempt at a job on this node: its log, its status, and nothing left behind."""

    def __init__(self, folder: Path, log: str, follower: _Follower, watch: Watch, say: Callable[[Event], None], num_restarts: int) -> None:
        self._num_restarts = num_restarts
        self._folder, self._follower, self._watch, self._say = folder, follower, watch, say
        self._place = watch.team.place
        self._log_path = folder / "logs" / (log if self._place.rank == 0 else f"{Path(log).stem}-node-{self._place.rank}.log")
        self._run_id, self._started_s = uuid.uuid4().hex, time.time()

    def run(self, job: Job, first: Job | None, restarts_left: int) -> tuple[int, bool]:
        """Runs the job; returns the exit code, and whether that is the end of it (else all nodes try again)."""
        self._status(state="running")
        code = 1
        try:
            with self._log_path.open("wb") as log:
                code, is_over = self._tasks(job, first, log, restarts_left)
        finally:
            _kill_all(self._run_id)
            state = "failed" if code not in (0, INTERRUPTED) else "stopped" if self._watch.signalled else "finished"
            self._status(state=state, exit_code=code, ended_s=time.time())
        return code, is_over

    def _tasks(self, job: Job, first: Job | None, log: IO[bytes], restarts_left: int) -> tuple[int, bool]:
        """The check, the steps before, the training, the steps after; the first that fails ends it."""
        is_first = self._watch.team.is_first
        if first:
            code, is_over = self._settle(*self._process(first, log), 0)
            if code or self._watch.signalled:
                return code, is_over
        if job.before:
            code, is_over = self._settle(*(self._steps(job.before, log) if is_first else (0, False)), restarts_left)
            if code or self._watch.signalled:
                return code, is_over
        code, is_over = self._settle(*self._process(job, log), restarts_left)
        if code or self._watch.signalled or not (is_first and job.after):
            return code, is_over
        code, _ = self._steps(job.after, log)  # the other nodes have left
        if code not in (0, INTERRUPTED):
            self._say(failure_event(code, list(self._follower.stderr), self._log_path))
        return code, True

    def _steps(self, steps: Sequence[Step], log: IO[bytes]) -> tuple[int, bool]:
        """Programs one after the other; those whose output is there already are left out."""
        for step in steps:
            fingerprint, name = step_fingerprint(step), {"step": step.name}
            if is_made(step, fingerprint):
                en, zh = f"{step.name}: made before", f"{step.name}：已存在，跳过"
                self._follower.on_event({"kind": "step", **name, "text_en": en, "text_zh": zh})
                continue
            self._follower.on_event({"kind": "step", **name, "text_en": f"{step.name} ...", "text_zh": f"{step.name} ……"})
            prepare(step)
            code, killed = self._process(step, log)
            if code or killed or self._watch.signalled:
                return code, killed
            mark_made(step, fingerprint)
        return 0, False

    def _settle(self, code: int, killed: bool, restarts_left: int) -> tuple[int, bool]:
        """What the ends on all nodes mean: the exit code, and whether that is the end of it."""
        event = failure_event(code, list(self._follower.stderr), self._log_path) if code not in (0, INTERRUPTED) and not killed else None
        ends = self._watch.settle(code, killed=killed, event=event)
        rank = cause(ends)
        if rank is None:
            return max(end["code"] for end in ends), True
        end, stopped = ends[rank], any(end["signalled"] for end in ends)
        is_over = not restarts_left or stopped or end["code"] == USER_ERROR or "lost" in end
        told = on_node(end["event"], rank, end["host"]) if self._place.nodes > 1 and "lost" not in end else end["event"]
        self._say(told if is_over else again(told))
        return int(end["code"]), is_over

    def _process(self, task: Job | Step, log: IO[bytes]) -> tuple[int, bool]:
        """Runs one program to its end; returns its exit code, and whether it was killed because of something elsewhere."""
        process = _start(task, self._watch.team, {RUN_VARIABLE: self._run_id, RESTART_VARIABLE: str(self._num_restarts)})
        watch = self._watch
        for _ in _follow(process, log, self._follower):
            if self._follower.is_hopeless:
                return self._kill(process, USER_ERROR), False
            watch.tick()
            if number := watch.next_signal():
                _signal(process, task, number)
                self._say(_stopping(number))
            if watch.is_time_to_kill():
                return self._kill(process, INTERRUPTED), True
        code = exit_code(process.wait(), list(self._follower.stderr))
        if watch.signalled and code & 127 in (signal.SIGINT, signal.SIGTERM):
            code = INTERRUPTED  # before training had begun there is nothing to save; drivers under Ray end with the number itself
        return code, False

    def _kill(self, process: subprocess.Popen[bytes], code: int) -> int:
        _kill_all(self._run_id)
        process.wait()
        return code

    def _status(self, **facts: Any) -> None:
        if self._watch.team.is_first:
            (self._folder / "job").mkdir(exist_ok=True)
            known = {"started_s": self._started_s, "log": self._log_path.name} | facts
            (self._folder / "job" / "status.json").write_text(json.dumps(known) + "\n", encoding="utf-8")


class _Follower:
    """Sorts the lines of a job: steps, events, and the last lines of stderr."""

    def __init__(
        self,
        read_step: Callable[[str], StepMetrics | None],
        on_step: Callable[[StepMetrics], None],
        on_event: Callable[[Event], None],
        run_dir: Path,
        watch: Watch,
        job: Job,
    ) -> None:
        self._read_step, self._on_step, self.on_event = read_step, on_step, on_event
        self._run_dir, self._watch = run_dir, watch
        self._restarts_left = int(job.argv[job.argv.index("--max-restarts") + 1]) if "--max-restarts" in job.argv else 0  # torchrun's
        self.is_hopeless = False  # the input is at fault: another attempt would end alike
        self.stderr: deque[str] = deque(maxlen=_NUM_KEPT_LINES)

    def stdout_line(self, line: str) -> None:
        if step := self._read_step(line):
            self._on_step(step)
        elif event := read_event(line):
            self.on_event(event)

    def stderr_line(self, line: str) -> None:
        if not line.strip():
            return
        self.stderr.append(line)
        if lost := lost_rank(line):
            rank, code = lost
            self.is_hopeless = code == USER_ERROR
            if not self._restarts_left:
                self._watch.failing()
            elif not self.is_hopeless and not self._watch.signalled:
                self.on_event(restart_event(rank, code, self._run_dir))
            self._restarts_left = max(0, self._restarts_left - 1)


def _start(task: Job | Step, team: Team, marks: dict[str, str]) -> subprocess.Popen[bytes]:
    place = team.place
    argv, own = resolve(task.argv, task.env, task.environment, place.facts())
    env = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // task.nproc))} | dict(os.environ) | own | marks
    if place.nodes > 1:
        env |= interface_env(env, place.master_addr)
    if task.environment and "PYTHONPATH" not in own:
        env.pop("PYTHONPATH", None)  # ours means nothing to its packages
    try:
        return subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise UserError(task.argv[0], f"cannot be started: {error.strerror}", f"无法启动：{error.strerror}") from None


def _stopping(number: int) -> Event:
    name = signal.Signals(number).name
    return {
        "kind": "signal",
        "text_en": f"{name}: saving a checkpoint before stopping (Ctrl-C again to stop at once)",
        "text_zh": f"{name}：保存检查点后停止（再按一次 Ctrl-C 立即停止）",
    }


def _follow(process: subprocess.Popen[bytes], log: IO[bytes], follower: _Follower) -> Iterator[None]:
    """Hands the job's lines on until both pipes close; yields at least every `_POLL_S` seconds."""
    assert process.stdout is not None and process.stderr is not None
    sinks = {process.stdout: follower.stdout_line, process.stderr: follower.stderr_line}
    rest = dict.fromkeys(sinks, b"")
    ended_s: float | None = None
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        for stream in sinks:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(timeout=_POLL_S):
                stream = process.stdout if key.fileobj is process.stdout else process.stderr
                chunk = os.read(stream.fileno(), 65536)
                log.write(chunk)
                log.flush()
                *lines, rest[stream] = (rest[stream] + chunk).split(b"\n")
                if not chunk:
                    selector.unregister(stream)
                    lines = [rest[stream]]
                for line in lines:
                    sinks[stream](line.decode(errors="replace"))
            yield
            # A process that outlives its parent may hold the pipes open for ever.
            if process.poll() is not None:
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s > _DRAIN_S:
                    return


def _signal(process: subprocess.Popen[bytes], job: Job | Step, number: int) -> None:
    """Passes a signal to the job's own processes.

    torchrun, when it gets one, kills its ranks after 30 s whatever they are saving; the ranks get it directly instead.
    """
    if "torch.distributed.run" in job.argv:
        ranks = [child.pid for child in psutil.Process(process.pid).children()] if process.poll() is None else []
        if ranks:
            for pid in ranks:
                _kill(pid, number)
            return
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it has just ended
        return


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # it has just ended
        return


def _kill_all(run_id: str) -> None:
    """Kills every process that still carries the run's mark."""
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == run_id:
                process.kill()
        except psutil.Error:  # another user's, or ended meanwhile
            continue


def _write_files(job: Job, folder: Path) -> None:
    for name, text in job.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # an unchanged file keeps its time: steps that read it are then not run again
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    (folder / "job").mkdir(exist_ok=True)
    started = job.model_dump(exclude={"files"}) | {"files": sorted(job.files)}
    (folder / "job" / "job.json").write_text(json.dumps(started, indent=2) + "\n", encoding="utf-8")


def next_log(folder: Path) -> Path:
    """Where the log of the next attempt in a run folder will be."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    numbers = [int(p.stem.split("-")[1]) for p in logs.glob("attempt-*.log") if p.stem.split("-")[1].isdigit()]
    return logs / f"attempt-{max(numbers, default=0) + 1}.log"

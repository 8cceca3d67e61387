"""Runs a job on this machine: starts it, follows its output, passes signals on, leaves no process behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Job, Step, StepMetrics
from ascendfactory.launch.devices import usable_cpus
from ascendfactory.launch.environments import resolve
from ascendfactory.launch.failure import USER_ERROR, exit_code, failure_event, lost_rank, restart_event
from ascendfactory.launch.lock import held
from ascendfactory.launch.steps import is_made, mark_made, node_facts, prepare, step_fingerprint

EVENT_MARK = "@event "
# Every process of a run carries this variable, so that those which left its process group are found as well:
# torchrun puts each rank in a session of its own.
RUN_VARIABLE = "ASCENDFACTORY_RUN"
_NUM_KEPT_LINES = 400  # of stderr, for the summary of a failure
_POLL_S = 0.2
_DRAIN_S = 2.0  # how long output is still read once the process has ended
INTERRUPTED = 130

Event = dict[str, Any]  # kind, text_en, text_zh and what belongs to the kind


def launch(
    job: Job,
    run_dir: str | Path,
    *,
    read_step: Callable[[str], StepMetrics | None],
    on_step: Callable[[StepMetrics], None] = lambda step: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> int:
    """Runs the job to its end and returns its exit code.

    The first SIGINT or SIGTERM is passed to the job, which saves a checkpoint and ends; a second SIGINT kills it.
    Everything the job prints goes to `run_dir/logs/attempt-N.log`, events also to `run_dir/logs/events.jsonl`.

    Args:
        job: what to run. Its files are written into the run folder first.
        run_dir: the run folder; made when missing.
        read_step: the back end's reader of its own output lines.
        on_step: called with each optimizer step.
        on_event: called with each `@event` of the job, and with `signal` and `failed` events of the launcher.

    Raises:
        UserError: when another launch is using the folder.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder):
        _write_files(job, folder)
        log_path = next_log(folder)
        with (folder / "logs" / "events.jsonl").open("a", encoding="utf-8") as events:

            def tell(event: Event) -> None:
                events.write(json.dumps(event, ensure_ascii=False) + "\n")
                events.flush()
                on_event(event)

            follower = _Follower(read_step, on_step, tell, folder, num_restarts=_restarts(job.argv))
            return _run_logged(job, folder, log_path, follower)


def _restarts(argv: Sequence[str]) -> int:
    """How often torchrun would start the job again."""
    return int(argv[argv.index("--max-restarts") + 1]) if "--max-restarts" in argv else 0


def _run_all(job: Job, folder: Path, run_id: str, log: IO[bytes], follower: _Follower) -> int:
    """The steps before, the training, the steps after; the first that fails ends it."""
    tasks: list[Job | Step] = [*job.before, job, *job.after]
    for task in tasks:
        if isinstance(task, Step):
            fingerprint = step_fingerprint(task)
            name = {"step": task.name}
            if is_made(task, fingerprint):
                follower.on_event({"kind": "step", **name, "text_en": f"{task.name}: made before", "text_zh": f"{task.name}：已存在，跳过"})
                continue
            follower.on_event({"kind": "step", **name, "text_en": f"{task.name} ...", "text_zh": f"{task.name} ……"})
            prepare(task)
        code = _run(task, run_id, log, follower)
        if code or follower.signalled:
            return code
        if isinstance(task, Step):
            mark_made(task, fingerprint)
    return 0


def _run_logged(job: Job, folder: Path, log_path: Path, follower: _Follower) -> int:
    """Runs the job with its log and status beside it; kills whatever it leaves behind."""
    run_id, started_s, code = uuid.uuid4().hex, time.time(), 1
    _write_status(folder, state="running", started_s=started_s, log=log_path.name)
    try:
        with log_path.open("wb") as log:
            code = _run_all(job, folder, run_id, log, follower)
        if follower.signalled and code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            code = INTERRUPTED  # the signal came before training had begun: nothing to save
        if code not in (0, INTERRUPTED):
            follower.on_event(failure_event(code, list(follower.stderr), log_path))
    finally:
        _kill_all(run_id)
        state = "failed" if code not in (0, INTERRUPTED) else "stopped" if follower.signalled else "finished"
        _write_status(folder, state=state, exit_code=code, started_s=started_s, ended_s=time.time(), log=log_path.name)
    return code


class _Follower:
    """Sorts the lines of a job: steps, events, and the last lines of stderr."""

    def __init__(
        self,
        read_step: Callable[[str], StepMetrics | None],
        on_step: Callable[[StepMetrics], None],
        on_event: Callable[[Event], None],
        run_dir: Path,
        *,
        num_restarts: int,
    ) -> None:
        self.read_step, self.on_step, self.on_event = read_step, on_step, on_event
        self._run_dir, self._restarts_left = run_dir, num_restarts
        self.is_hopeless = False  # the input is at fault: another attempt would end alike
        self.stderr: deque[str] = deque(maxlen=_NUM_KEPT_LINES)
        self.signalled = False

    def stdout_line(self, line: str) -> None:
        if step := self.read_step(line):
            self.on_step(step)
        elif line.startswith(EVENT_MARK):
            try:
                event = json.loads(line[len(EVENT_MARK) :])
            except ValueError:  # two ranks' lines in one: it stays in the log
                return
            if isinstance(event, dict):
                self.on_event(event)

    def stderr_line(self, line: str) -> None:
        if not line.strip():
            return
        self.stderr.append(line)
        if lost := lost_rank(line):
            rank, code = lost
            self.is_hopeless = code == USER_ERROR
            if self._restarts_left and not self.is_hopeless and not self.signalled:
                self.on_event(restart_event(rank, code, self._run_dir))
            self._restarts_left = max(0, self._restarts_left - 1)


def _run(job: Job | Step, run_id: str, log: IO[bytes], follower: _Follower) -> int:
    argv, own = resolve(job.argv, job.env, job.environment, node_facts())
    env = {"OMP_NUM_THREADS": str(max(1, usable_cpus() // job.nproc))} | dict(os.environ) | own | {RUN_VARIABLE: run_id}
    if job.environment and "PYTHONPATH" not in own:
        env.pop("PYTHONPATH", None)  # ours means nothing to its packages
    try:
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise UserError(job.argv[0], f"cannot be started: {error.strerror}", f"无法启动：{error.strerror}") from None
    signals: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    with _handling(forward):
        num_handled = 0
        for _ in _follow(process, log, follower):
            if follower.is_hopeless:
                _kill_all(run_id)
                process.wait()
                return USER_ERROR
            while num_handled < len(signals):
                num_handled += 1
                if num_handled > 1 and signals[num_handled - 1] == signal.SIGINT:
                    _kill_all(run_id)
                    process.wait()
                    follower.signalled = True
                    return INTERRUPTED
                if num_handled == 1:
                    follower.signalled = True
                    _signal(process, job, signals[0])
                    follower.on_event(_stopping(signals[0]))
    return exit_code(process.wait(), list(follower.stderr))


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


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Gives SIGINT and SIGTERM to the handler; outside the main thread Python forbids it and signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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


def _write_status(folder: Path, **facts: Any) -> None:
    (folder / "job").mkdir(exist_ok=True)
    (folder / "job" / "status.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")

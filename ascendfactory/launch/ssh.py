"""Starts a plan on several machines from one of them, or from a machine beside them: a launch on each, led over ssh.

ssh passes no signals on, so each launch is told what to do on its standard input (`launch/node.py`); when this process or the line
dies, the input ends, and so does the launch. The nodes themselves meet over TCP (`launch/team.py`).
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ascendfactory import __version__
from ascendfactory.core.lines import read_event, read_step
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan, StepMetrics
from ascendfactory.launch.node import READY_MARK
from ascendfactory.launch.place import Place
from ascendfactory.launch.watch import INTERRUPTED, Event

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_DESCRIBE_S = 60.0
_LEAVE_S = 120.0  # once node 0 has ended the others end by themselves; after so long their lines are cut
_LOCAL = ("localhost", "127.0.0.1")
# The nodes are expected to look like this machine: these go with the command.
_PASSED_NAMES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "NO_PROXY", "no_proxy")
_PASSED_PREFIXES = ("ASCEND", "ATB_", "HF_", "LC_", "NCCL_", "HCCL_", "GLOO_", "TP_SOCKET", "OMP_", "CUDA_", "RAY_", "PYTORCH_")


def read_hosts(text: str) -> list[str]:
    """Machines named as `a,b,user@c`, or in a file as `@FILE`: one a line, what follows the name (`slots=8`) left aside.

    Raises:
        UserError: there is no such file, no name, or a name twice.
    """
    if text.startswith("@"):
        path = Path(text[1:]).expanduser()
        if not path.is_file():
            raise UserError("--hosts", f"no such file {path}", f"没有文件 {path}")
        lines = (line.split("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines())
        names = [words[0] for words in lines if words]
    else:
        names = [name.strip() for name in text.split(",") if name.strip()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        en, zh = (f"{', '.join(twice)} is named twice", f"{'、'.join(twice)} 重复") if twice else ("no machine is named", "没有写明机器")
        raise UserError("--hosts", f"{en}; write --hosts a,b or --hosts @file", f"{zh}；请写 --hosts a,b 或 --hosts @文件")
    return names


def start_on_hosts(
    plan: Plan,
    hosts: Sequence[str],
    *,
    on_step: Callable[[StepMetrics], None],
    on_event: Callable[[Event], None],
    ssh: Sequence[str] = SSH,
) -> int:
    """Runs a plan on the hosts, the first being node 0; returns the exit code.

    Each host has this Python, and this folder on a disk that all share, under the same paths.

    Raises:
        UserError: a host cannot be reached, or is not fit for the plan (a line for each).
    """
    described = _describe_all(hosts, ssh)
    port = os.environ.get("MASTER_PORT") or str(described[0]["port"])
    address = _address(hosts, described)
    nodes = [_Node(host, Place(rank, len(hosts), address, int(port)), ssh) for rank, host in enumerate(hosts)]
    for node in nodes:
        node.open(plan)
    told: list[Event] = []

    def tell(event: Event) -> None:
        told.append(event)
        on_event(event)

    _lead(nodes, on_step, tell)
    code = nodes[0].process.returncode
    if code == 2 and not any(event["kind"] == "failed" for event in told):
        raise UserError("", *(["\n".join(nodes[0].errors)] * 2))
    if code not in (0, 1, 2, INTERRUPTED) and not any(event["kind"] == "failed" for event in told):
        words = " ".join(nodes[0].errors[-3:]) or f"code {code}"
        on_event(
            {
                "kind": "failed",
                "code": code,
                "text_en": f"the launch on {hosts[0]} ended: {words}",
                "text_zh": f"{hosts[0]} 上的启动器退出：{words}",
                "lines": nodes[0].errors[-12:],
            }
        )
    return code if code >= 0 else 128 - code


@dataclass
class _Node:
    """The launch on one host."""

    host: str
    place: Place
    ssh: Sequence[str]
    errors: list[str] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def open(self, plan: Plan) -> None:
        """Starts it and hands it the plan."""
        env = self.place.env()
        self._process = subprocess.Popen(
            [*self.ssh, self.host, _remote(["-m", "ascendfactory.launch.node"], env)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the jobs through us, once
        )
        self.say(plan.model_dump_json())

    def say(self, line: str) -> None:
        """A line for its standard input; one that has ended hears nothing."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            return

    def follow(self, on_line: Callable[[str], None]) -> list[threading.Thread]:
        """Threads that hand on what it prints, and keep its errors."""

        def read_out() -> None:
            for line in self.process.stdout or ():
                on_line(line.rstrip("\n"))

        def read_errors() -> None:
            for line in self.process.stderr or ():
                self.errors.append(line.rstrip("\n"))
                del self.errors[:-200]

        threads = [threading.Thread(target=read, daemon=True) for read in (read_out, read_errors)]
        for thread in threads:
            thread.start()
        return threads


def _lead(nodes: list[_Node], on_step: Callable[[StepMetrics], None], on_event: Callable[[Event], None]) -> None:
    """Passes signals on and steps back until every launch has ended."""
    signals: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    def line_of_first(line: str) -> None:
        if step := read_step(line):
            on_step(step)
        elif event := read_event(line):
            on_event(event)

    main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)} if main_thread else {}
    threads = [thread for node in nodes for thread in node.follow(line_of_first if node.place.rank == 0 else lambda line: None)]
    try:
        num_handled, first_ended_s = 0, None
        while any(node.process.poll() is None for node in nodes):
            while num_handled < len(signals):
                num_handled += 1
                for node in nodes[:1] if num_handled == 1 else nodes:
                    node.say(f"stop {signals[num_handled - 1]}" if num_handled == 1 else "kill")
            if nodes[0].process.poll() is not None:
                first_ended_s = first_ended_s or time.monotonic()
                if time.monotonic() - first_ended_s > _LEAVE_S:
                    break
            time.sleep(0.05)
        for thread in threads:
            thread.join(timeout=2)
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait()
        for number, old in before.items():
            signal.signal(number, old)


def _describe_all(hosts: Sequence[str], ssh: Sequence[str]) -> list[dict[str, object]]:
    """What every host tells of itself.

    Raises:
        UserError: with a line for each host that cannot be reached or has another AscendFactory.
    """
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        answers = list(pool.map(lambda host: _describe(host, ssh), hosts))
    problems = [answer for answer in answers if isinstance(answer, UserError)]
    if problems:
        raise UserError("", "\n".join(f"{p.where}: {p.en}" for p in problems), "\n".join(f"{p.where}: {p.zh}" for p in problems))
    return [answer for answer in answers if isinstance(answer, dict)]


def _describe(host: str, ssh: Sequence[str]) -> dict[str, object] | UserError:
    command = [*ssh, host, _remote(["-m", "ascendfactory.launch.node", "--describe"], {})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_DESCRIBE_S, check=False)
        words = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        return UserError(
            host, f"no answer for {_DESCRIBE_S:.0f} s; try: ssh {host} true", f"{_DESCRIBE_S:.0f} 秒无应答；请尝试 ssh {host} true"
        )
    except OSError as error:
        return UserError(ssh[0], f"cannot be started: {error.strerror}; install it", f"无法启动：{error.strerror}；请先安装")
    if done.returncode == 255:
        return UserError(host, f"cannot be reached: {words}; try: ssh {host} true", f"无法连接：{words}；请尝试 ssh {host} true")
    line = next((line for line in done.stdout.splitlines() if line.startswith(READY_MARK)), None)
    if done.returncode or line is None:
        where = f"{sys.executable} in {Path.cwd()}"
        return UserError(
            host,
            f"cannot run {where}: {words}; the nodes need the same paths as here",
            f"无法运行 {where}：{words}；各节点的路径须与本机相同",
        )
    facts: dict[str, object] = json.loads(line[len(READY_MARK) :])
    if facts["version"] != __version__:
        return UserError(
            host,
            f"has AscendFactory {facts['version']}, this machine {__version__}; install the same",
            f"的 AscendFactory 为 {facts['version']}，本机为 {__version__}；请安装相同版本",
        )
    return facts


def _remote(words: list[str], env: dict[str, str]) -> str:
    """The command for a host's shell: this folder, these variables, this Python."""
    passed = {name: value for name, value in os.environ.items() if name in _PASSED_NAMES or name.startswith(_PASSED_PREFIXES)}
    assigned = [f"{name}={shlex.quote(value)}" for name, value in sorted((passed | env).items())]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec env {' '.join(assigned)} {shlex.join([sys.executable, *words])}"


def _address(hosts: Sequence[str], described: list[dict[str, object]]) -> str:
    """Where the other hosts find the first: the address of its name, else (an alias of ssh's own) its first one."""
    name = hosts[0].rpartition("@")[2]
    if all(host.rpartition("@")[2] in _LOCAL for host in hosts):
        return "127.0.0.1"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "127.0.0.1"
    own = described[0]["addresses"]
    if address.startswith("127.") and isinstance(own, list) and own:
        return str(own[0])
    return address

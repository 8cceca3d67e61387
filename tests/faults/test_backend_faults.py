"""What goes wrong with another framework's job, each through the real command: one clear line, the right exit code, no process left.

The framework is a stand-in that behaves as its environment's Python: it fails, is killed, leaves children behind, or waits.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from ascendfactory.launch.node import free_port
from tests.tiny import write_chats, write_model

ENVIRONMENT = "llamafactory-0.9.5"
FRAMEWORK = """
import os, signal, subprocess, sys, time
if sys.argv[1:2] == ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])  # a step of our own before training
child = subprocess.Popen([{python!r}, "-c", "import time; time.sleep(600)", {mark!r}], start_new_session=True)
print("{{'loss': 1.0}}", flush=True)
what = os.environ["FRAMEWORK"]
if what == "fails":
    print("Traceback (most recent call last):", file=sys.stderr)
    sys.exit("ValueError: the template does not fit")
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
open({mark!r}, "w").close()
while True:
    time.sleep(0.05)
"""
SSH = (
    '#!/bin/sh\ncase $1 in down) echo "ssh: connect to host down port 22: No route to host" >&2; exit 255;; esac\nshift; exec sh -c "$*"\n'
)


class Place:
    """A folder with a model, data, a recipe for LLaMA-Factory, and a stand-in for its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.mark = folder, folder / "run", folder / "framework-runs"
        self.home = folder / "environments" / ENVIRONMENT
        write_model(folder / "model", "llama")
        write_chats(folder / "chats.jsonl", 8)
        self.recipe = {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "chats.jsonl"), "seq_len": 64},
            "batch": 2,
            "duration": "2 steps",
            "cluster": "1 cpu",
            "backend": "llamafactory",
            "output": {"dir": str(self.run_dir)},
        }

    def install(self) -> Place:
        """The stand-in, whole."""
        (self.home / "bin").mkdir(parents=True)
        (self.folder / "framework.py").write_text(FRAMEWORK.format(python=sys.executable, mark=str(self.mark)))
        python = self.home / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {self.folder / "framework.py"} "$@"\n')
        python.chmod(0o755)
        (self.home / "environment.json").write_text("{}")
        return self

    def command(self, *words: str) -> list[str]:
        """`train` of the recipe."""
        (self.folder / "r.yaml").write_text(yaml.safe_dump(self.recipe))
        return [sys.executable, "-m", "ascendfactory", "train", str(self.folder / "r.yaml"), *words]

    def env(self, **more: str) -> dict[str, str]:
        """This process's variables, with the stand-in's."""
        return os.environ | {"ASCENDFACTORY_ENVIRONMENTS": str(self.home.parent), "LC_ALL": "C.UTF-8", "LANG": "en", **more}

    def train(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The command, run to its end."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120, check=False, env=self.env(**env))

    def left(self) -> list[list[str]]:
        """Command lines of living processes that belong to this folder."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                if process.status() != psutil.STATUS_ZOMBIE and any(str(self.folder) in word for word in words):
                    found.append(words)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def refused(place: Place, line: str, *words: str, **env: str) -> None:
    """The command ends with exit code 2 and this one line, and leaves nothing."""
    done = place.train(*words, **env)
    assert (done.returncode, done.stderr.strip().splitlines()) == (2, [f"error: {line}"])
    assert place.left() == [] and not place.run_dir.exists()


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("fails", 1, "ValueError: the template does not fit"),
        ("killed", 137, "most often the machine ran out of memory"),
    ],
)
def test_a_failing_framework_is_told_by_its_own_last_words(place: Place, what: str, code: int, line: str) -> None:
    done = place.install().train(FRAMEWORK=what)
    assert done.returncode == code
    assert line in done.stderr and str(place.run_dir / "logs") in done.stderr
    assert place.left() == []
    assert json.loads((place.run_dir / "job" / "status.json").read_text())["state"] == "failed"


def test_the_same_command_runs_again_after_a_failure(place: Place) -> None:
    place.install().train(FRAMEWORK="fails")
    done = place.train(FRAMEWORK="fails")
    assert done.returncode == 1 and "ValueError: the template does not fit" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_process_of_the_framework(place: Place, number: signal.Signals) -> None:
    command, env = place.install().command(), place.env(FRAMEWORK="waits")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    deadline_s = time.monotonic() + 60
    while not place.mark.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(place.left()) >= 3  # the command, the framework, its child
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said  # interrupted before anything was saved
    assert place.left() == []


def test_a_missing_environment(place: Place) -> None:
    refused(place, "llamafactory: its environment is not installed; run: ascendfactory install llamafactory --profile 0.9.5")


def test_an_installation_that_was_broken_off(place: Place) -> None:
    place.home.mkdir(parents=True)
    refused(place, "llamafactory: its environment is only partly installed; run: ascendfactory install llamafactory --profile 0.9.5")


def test_a_wrong_profile(place: Place) -> None:
    place.recipe["profile"] = "0.9.4"
    refused(place.install(), "profile: llamafactory: no profile '0.9.4'; write profile: 0.9.5")


@pytest.fixture
def two_nodes(place: Place) -> list[str]:
    ssh = place.folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    place.recipe["cluster"] = {"device": "cpu", "nproc": 1}
    place.install()
    return ["--ssh", str(ssh)]


def test_an_unreachable_node(place: Place, two_nodes: list[str]) -> None:
    line = "down: cannot be reached: ssh: connect to host down port 22: No route to host; try: ssh down true"
    refused(place, line, "--hosts", "here,down", *two_nodes)


def test_a_port_in_use(place: Place, two_nodes: list[str]) -> None:
    port = free_port()
    line = f"port {port}: cannot be listened at (Address already in use); end what holds it, or export MASTER_PORT=<another> "
    with socket.create_server(("", port)):
        refused(place, line + "(it and the next are used)", "--hosts", "a,b", *two_nodes, MASTER_PORT=str(port))


def test_a_full_disk(place: Place) -> None:
    logs = place.run_dir / "logs"
    logs.mkdir(parents=True)
    (logs / "events.jsonl").symlink_to("/dev/full")  # every write there fails as on a full disk
    done = place.install().train(FRAMEWORK="waits")
    assert done.returncode == 2
    line = "no space is left on the disk; free some, then run the same command again: it goes on from the newest checkpoint"
    assert done.stderr.strip().splitlines() == [f"error: {line}"]
    assert place.left() == []

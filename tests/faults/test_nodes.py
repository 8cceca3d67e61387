"""Two nodes led by ssh: they train as one process does; what goes wrong on one is told in one line, and leaves nothing behind.

`ssh` is a script that runs the command on this machine: everything else is real.
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

from ascendfactory.launch.node import free_port
from tests.runs import make_tiny_plan, train
from tests.tiny import write_model

SSH = """#!/bin/sh
host=$1; shift
case $host in down*) echo "ssh: connect to host $host port 22: Connection refused" >&2; exit 255;; esac
exec sh -c "$*"
"""
RECIPE = """
name: two
model: {{path: {folder}/model, dtype: float32}}
data: {{train: {folder}/data.jsonl, seq_len: 64, cache_dir: {folder}/cache, workers: 1}}
batch: {{global_size: 8, micro_size: 2}}
duration: {steps} steps
optim: {{lr: 1.0e-3, weight_decay: 0.1, max_grad_norm: 0.5, warmup: 0.0}}
cluster: {{device: cpu, nproc: 1}}
checkpoint: {{every: 2 steps}}
output: {{dir: {folder}/run, export: false}}
seed: 5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i * i}"}]} for i in range(64)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def command(folder: Path, hosts: str, steps: int, *words: str) -> list[str]:
    (folder / "r.yaml").write_text(RECIPE.format(folder=folder, steps=steps))
    return [sys.executable, "-m", "ascendfactory", "train", str(folder / "r.yaml"), "--hosts", hosts, "--ssh", str(folder / "ssh"), *words]


def run(folder: Path, hosts: str, steps: int, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, hosts, steps, *words), capture_output=True, text=True, timeout=300, env=os.environ | env)


def engines(folder: Path) -> list[psutil.Process]:
    """The ranks that train now."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if str(folder / "run" / "plan.json") in words and "torch.distributed.run" not in words:
            found.append(process)
    return found


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_host_that_cannot_be_reached_is_named_before_anything_starts(folder: Path) -> None:
    write_model(folder / "model", "llama")
    done = run(folder, "a,down1,down2", 3)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: {name}: cannot be reached: ssh: connect to host {name} port 22: Connection refused; try: ssh {name} true"
        for name in ("down1", "down2")
    ]
    assert not (folder / "run").exists()


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    write_model(folder / "model", "llama")
    port = str(free_port())  # a free pair: the next one is listened at first
    with socket.create_server(("", int(port))):
        done = run(folder, "a,b", 3, MASTER_PORT=port)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        f"error: port {port}: cannot be listened at (Address already in use); "
        "end what holds it, or export MASTER_PORT=<another> (it and the next are used)"
    ]
    assert not (folder / "run").exists()


@pytest.mark.parallel
def test_two_nodes_train_as_one_process_and_a_killed_rank_is_started_again(folder: Path) -> None:
    model = write_model(folder / "model", "qwen3")
    plan = make_tiny_plan(model, str(folder / "data.jsonl"), str(folder / "alone"), duration="8 steps")
    expected = [step.loss for step in train(plan.model_dump_json())]

    done = run(folder, "a,b", 4)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(expected[:4], rel=2e-2)  # its schedule ends sooner
    assert losses(folder)[:1] == pytest.approx(expected[:1], rel=1e-5)
    assert (folder / "run" / "checkpoints" / "step-00000004").is_dir()

    (folder / "run").rename(folder / "first")
    process = subprocess.Popen(
        command(folder, "a,b", 8, "--cluster.restarts=1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline_s = time.monotonic() + 120
    while not (folder / "run" / "checkpoints" / "step-00000002").is_dir() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    engines(folder)[-1].send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "starting again from the newest checkpoint" in said
    assert "resumed at step" in said
    by_step = {row["step"]: row["loss"] for row in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())}
    assert [by_step[step] for step in range(1, 9)] == pytest.approx(expected, rel=1e-5)
    assert engines(folder) == []

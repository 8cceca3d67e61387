"""The program that makes a Ray cluster of a job's nodes, with an executable in the place of `ray` that writes down its calls.

The stand-in does what the program relies on: `start --head` listens on its port, `start` holds until SIGTERM, `status` lists the resources
of those that hold. (It was run with Ray 2.60 itself on two nodes of one machine, too.)
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
from typing import Any

import pytest

PROGRAMS = Path(__file__).parents[2] / "ascendfactory" / "backends" / "programs"
FAKE = f"""#!{sys.executable}
import json, os, signal, socket, sys, time
folder, words = os.environ["FAKE_RAY"], sys.argv[1:]
with open(os.path.join(folder, "calls.jsonl"), "a") as out:
    out.write(json.dumps(words) + "\\n")
options = dict(word.partition("=")[::2] for word in words)
if words[0] == "status":
    print("".join(f" 0.0/1.0 {{name[6:]}}\\n" for name in os.listdir(folder) if name.startswith("alive-")))
    sys.exit(0)
if "--head" in words:
    if os.environ.get("FAKE_HEAD_FAILS"):
        sys.exit("port in use")
    server = socket.create_server(("127.0.0.1", int(options["--port"])))
rank = next(name for name in json.loads(options["--resources"]) if name.startswith("node_rank_"))
alive = os.path.join(folder, "alive-" + rank)
open(alive, "w").close()
def end(*_):
    os.remove(alive)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
while True:
    time.sleep(0.02)
"""
QUICK = "import sys, ray_node; ray_node.WAIT_S = float(sys.argv.pop(1)); ray_node.POLL_S = 0.05; sys.exit(ray_node.main(sys.argv[1:]))"
DRIVER = "import os, sys; print('driver at', os.environ['RAY_ADDRESS'], flush=True); sys.exit({})"
SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(30)"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
    return number


def start(
    folder: Path, rank: int, port: int, driver: list[str], *, nodes: int = 2, wait_s: float = 20, **env: str
) -> subprocess.Popen[str]:
    (folder / "bin").mkdir(exist_ok=True)
    fake = folder / "bin" / "ray"
    fake.write_text(FAKE, encoding="utf-8")
    fake.chmod(0o755)
    words = [sys.executable, "-c", QUICK, str(wait_s), str(rank), str(nodes), "127.0.0.1", str(port), "npu:8", "--", *driver]
    own = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_RAY": str(folder), "PYTHONPATH": str(PROGRAMS)}
    outside = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=outside | own | env, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=20)
    return process.returncode, out, err


def calls(folder: Path) -> list[dict[str, Any]]:
    """The `ray start` calls, their resources read."""
    found = []
    for line in (folder / "calls.jsonl").read_text(encoding="utf-8").splitlines():
        words = json.loads(line)
        if words[0] == "start":
            options = dict(word.partition("=")[::2] for word in words[1:])
            found.append({**options, "--resources": json.loads(options["--resources"])})
    return found


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("alive-*")]


def test_the_driver_runs_once_on_node_0_when_all_have_joined(tmp_path: Path, port: int) -> None:
    other = start(tmp_path, 1, port, ["python", "-c", DRIVER.format(0)])
    head = start(tmp_path, 0, port, ["python", "-c", DRIVER.format(0)])
    (code, out, _), (other_code, other_out, _) = ended(head), ended(other)
    assert (code, other_code) == (0, 0)
    assert f"driver at 127.0.0.1:{port}\n" in out and "driver" not in other_out
    assert "Ray: 2 of 2 nodes" in out and "2 个节点中的 2 个" in out
    by_rank = {next(iter(call["--resources"])): call for call in calls(tmp_path)}
    assert by_rank["node_rank_0"]["--port"] == str(port) and "--head" in by_rank["node_rank_0"]
    assert by_rank["node_rank_1"]["--address"] == f"127.0.0.1:{port}" and "--head" not in by_rank["node_rank_1"]
    assert [call["--resources"]["NPU"] for call in by_rank.values()] == [8, 8]
    assert all("--block" in call for call in by_rank.values()) and left(tmp_path) == []


def test_the_drivers_failure_is_the_jobs(tmp_path: Path, port: int) -> None:
    other = start(tmp_path, 1, port, [sys.executable, "-c", DRIVER.format(5)])
    head = start(tmp_path, 0, port, [sys.executable, "-c", DRIVER.format(5)])
    assert (ended(head)[0], ended(other)[0]) == (5, 0)
    assert left(tmp_path) == []


def test_a_node_that_does_not_come_is_named(tmp_path: Path, port: int) -> None:
    other = start(tmp_path, 1, port, ["python", "-c", DRIVER.format(0)], nodes=4)
    head = start(tmp_path, 0, port, ["python", "-c", DRIVER.format(0)], nodes=4, wait_s=1.5)
    code, out, err = ended(head)
    assert code == 1 and "driver at" not in out
    assert "error: node 2, 3 did not join Ray within" in err and "节点 2、3 未在" in out
    assert ended(other)[0] == 0 and left(tmp_path) == []


def test_without_a_head_the_others_end_with_a_line(tmp_path: Path, port: int) -> None:
    code, _, err = ended(start(tmp_path, 1, port, ["python", "-c", DRIVER.format(0)], wait_s=0.3))
    assert code == 1
    assert f"error: node 1 is not in Ray at 127.0.0.1:{port}: no answer there" in err
    assert not (tmp_path / "calls.jsonl").exists()


def test_a_head_that_does_not_start_is_said(tmp_path: Path, port: int) -> None:
    code, out, err = ended(start(tmp_path, 0, port, ["python", "-c", DRIVER.format(0)], FAKE_HEAD_FAILS="1"))
    assert code == 1 and "driver at" not in out
    assert f"error: Ray's head did not start on port {port}" in err


@pytest.mark.parametrize(("driver", "code"), [(SLEEPER, 7), ("import time; print('ready', flush=True); time.sleep(30)", 128 + 15)])
def test_sigterm_goes_to_the_driver_and_ray_ends_after_it(tmp_path: Path, port: int, driver: str, code: int) -> None:
    head = start(tmp_path, 0, port, ["python", "-c", driver], nodes=1)
    assert head.stdout is not None
    while "ready" not in head.stdout.readline():
        continue
    head.send_signal(signal.SIGTERM)
    assert ended(head)[0] == code
    assert left(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_while_nodes_gather_ends_ray(tmp_path: Path, port: int, rank: int) -> None:
    listener = socket.create_server(("127.0.0.1", port)) if rank else None
    node = start(tmp_path, rank, port, ["python", "-c", DRIVER.format(0)])
    while not left(tmp_path):
        time.sleep(0.02)
    node.send_signal(signal.SIGTERM)
    code, out, _ = ended(node)
    if listener is not None:
        listener.close()
    assert code == 143 and "driver at" not in out and left(tmp_path) == []


def test_a_users_own_cluster_is_used_and_none_started(tmp_path: Path, port: int) -> None:
    driver = ["python", "-c", DRIVER.format(0)]
    head, other = (start(tmp_path, rank, port, driver, RAY_ADDRESS="10.0.0.9:6379") for rank in (0, 1))
    (code, out, _), (other_code, other_out, _) = ended(head), ended(other)
    assert (code, other_code, out, other_out) == (0, 0, "driver at 10.0.0.9:6379\n", "")
    assert not (tmp_path / "calls.jsonl").exists()

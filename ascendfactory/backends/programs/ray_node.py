"""Makes a Ray cluster of a job's nodes and runs its one driver there; started alike on every node, in the framework's environment.

    python ray_node.py NODE_RANK NODES MASTER_ADDR PORT KIND:COUNT -- DRIVER ...

Node 0 starts the head on PORT, waits until every node has joined, runs DRIVER and ends with its exit code. The others join and stay
until the head is gone (code 0). Whatever ends a node, its own Ray processes end with it, and no others: `ray start --block` holds them
as children. Where RAY_ADDRESS names a cluster already, nothing is started, and node 0 runs DRIVER against it.

KIND:COUNT are a node's devices. Ray finds CUDA's itself, Ascend's are told to it as the resource NPU, which verl and MindSpeed-RL ask for.
SIGTERM and SIGINT go to DRIVER; before it runs, and on the other nodes, they end the program (143, 130).
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

WAIT_S = 600.0  # for nodes that are still being started
POLL_S = 2.0
LOOK_S = 0.1  # between looks at the driver
STOP_S = 30.0  # until Ray's processes are killed
GONE_AFTER = 3  # failed knocks at the head in a row
SIGNALS = (signal.SIGTERM, signal.SIGINT)
RANK = "node_rank_"  # a resource of each node, by which the head knows who has joined


class Stopped(Exception):
    """A signal to end."""

    def __init__(self, number):
        self.number = number


def tell(en, zh, failed=False):
    """Prints one event for the launcher; a failure also on stderr, where its summary looks."""
    print("@event " + json.dumps({"kind": "ray", "text_en": en, "text_zh": zh}, ensure_ascii=False), flush=True)
    if failed:
        print(f"error: {en}", file=sys.stderr, flush=True)


class Node:
    """One node: its place, its Ray processes, the driver."""

    def __init__(self, rank, nodes, host, port, devices):
        kind, _, count = devices.partition(":")
        self.rank, self.nodes, self.port = int(rank), int(nodes), int(port)
        self.host, self.npus, self.gpus = host, int(count) if kind == "npu" else 0, int(count) if kind == "cuda" else 0
        self.ray = self.driver = self.late = self.passed = None
        self.is_starting = False  # a process that is not yet in `ray` or `driver`
        folder = str(Path(sys.executable).parent)
        self.command = shutil.which("ray", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
        for number in SIGNALS:
            signal.signal(number, self.heed)

    def heed(self, number, frame):
        """Passes a signal on, or ends the program."""
        if self.is_starting:
            self.late = number
        elif self.driver is None:
            raise Stopped(number)
        elif self.driver.poll() is None:
            self.passed = number
            self.driver.send_signal(number)

    def start(self, name, words, env=None):
        """Starts a process and keeps it under a name; a signal that comes meanwhile is heeded after."""
        self.is_starting = True
        setattr(self, name, subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        self.is_starting = False
        if self.late is not None:
            self.heed(self.late, None)

    def address(self):
        """Where the head is: `IP:PORT`."""
        return f"{self.head_ip()}:{self.port}"

    def head_ip(self):
        ip = socket.gethostbyname(self.host)
        # many systems let a machine's own name mean 127.0.1.1, where no other node reaches it
        return own_ip("192.0.2.1") if self.rank == 0 and ip.startswith("127.0.1.") else ip

    def start_ray(self):
        """Starts this node's Ray processes as children of one that waits for them."""
        resources = {f"{RANK}{self.rank}": 1} | ({"NPU": self.npus} if self.npus else {})
        head = ["--head", f"--port={self.port}", f"--node-ip-address={self.head_ip()}"]
        other = [f"--address={self.address()}", f"--node-ip-address={own_ip(self.head_ip())}"]
        words = ["start", "--block", *(other if self.rank else head), f"--resources={json.dumps(resources)}", "--disable-usage-stats"]
        words += [f"--num-gpus={self.gpus}"] if self.gpus else []
        self.start("ray", [self.command, *words])

    def stop(self):
        """Ends this node's Ray processes and what the driver left; only returns when they have ended."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self.ray is not None and self.ray.poll() is None:
            self.ray.terminate()
            try:
                self.ray.wait(STOP_S)
            except subprocess.TimeoutExpired:
                print(f"Ray did not end within {STOP_S:.0f} s: killed", file=sys.stderr)
        for process in (self.driver, self.ray):
            if process is not None:
                with contextlib.suppress(ProcessLookupError):  # nothing is left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def joined(self):
        """Ranks of the nodes that Ray counts as alive."""
        try:
            words = [self.command, "status", f"--address={self.address()}"]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return set()
        return {int(rank) for rank in re.findall(rf"/1\.0 {RANK}(\d+)", done.stdout)}

    def gather(self):
        """Waits until every node has joined; returns whether they have."""
        deadline, told = time.monotonic() + WAIT_S, 0
        while self.ray.poll() is None:
            here = self.joined()
            if len(here) > told:
                told = len(here)
                tell(f"Ray: {told} of {self.nodes} nodes", f"Ray：{self.nodes} 个节点中的 {told} 个")
            if len(here) >= self.nodes:
                return True
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.nodes)) - here)
                en, zh = ", ".join(map(str, missing)), "、".join(map(str, missing))
                tell(
                    f"node {en} did not join Ray within {WAIT_S / 60:g} minutes; is it started, and can it reach {self.address()}?",
                    f"节点 {zh} 未在 {WAIT_S / 60:g} 分钟内加入 Ray；它是否已启动、能否连到 {self.address()}？",
                    failed=True,
                )
                return False
            time.sleep(POLL_S)
        tell(f"Ray's head did not start on port {self.port}", f"Ray 主节点未能在端口 {self.port} 启动", failed=True)
        return False

    def lead(self, driver):
        """Node 0: head, then driver; the driver's exit code."""
        self.start_ray()
        return self.run(driver, self.address()) if self.gather() else 1

    def run(self, driver, address):
        """The driver's exit code, 128 + n for signal n."""
        words = [sys.executable, *driver[1:]] if driver[0] == "python" else driver
        self.start("driver", words, os.environ | {"RAY_ADDRESS": address})
        while (code := self.driver.poll()) is None:
            time.sleep(LOOK_S)  # not wait(): a signal just before it blocks would be heeded only after the driver's end
        if self.passed is not None and code == self.passed:  # so ends a driver that Ray has taught to heed signals
            code = -code
        return code if code >= 0 else 128 - code

    def follow(self):
        """Another node: joins as soon as the head is there, and stays until it is gone."""
        deadline, knocks = time.monotonic() + WAIT_S, 0
        while True:
            if self.answers():
                knocks = 0
                if self.ray is None:
                    self.start_ray()
                elif self.ray.poll() is not None:
                    if time.monotonic() > deadline:
                        break
                    self.start_ray()  # the head was not ready for it yet
            elif self.ray is not None:
                knocks += 1
                if knocks >= GONE_AFTER:
                    return 0
            elif time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        en, zh = ("Ray on this node has ended", "本节点的 Ray 已结束") if self.ray else ("no answer there", "无应答")
        tell(
            f"node {self.rank} is not in Ray at {self.host}:{self.port}: {en}",
            f"节点 {self.rank} 不在 {self.host}:{self.port} 的 Ray 中：{zh}",
            failed=True,
        )
        return 1

    def answers(self):
        """Whether something listens where the head should be."""
        try:
            with socket.create_connection((self.host, self.port), timeout=POLL_S):
                return True
        except OSError:  # also a name that is not known yet
            return False


def own_ip(toward):
    """This machine's address on the way to another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))  # sends nothing: the kernel only chooses the way
        return probe.getsockname()[0]


def main(words):
    """The exit code of the driver on node 0, else 0 once the head is gone."""
    cut = words.index("--")
    node, driver = Node(*words[:cut]), words[cut + 1 :]
    try:
        if cluster := os.environ.get("RAY_ADDRESS"):
            return node.run(driver, cluster) if node.rank == 0 else 0
        if node.command is None:
            tell("the command ray is not in this environment", "此环境中没有 ray 命令", failed=True)
            return 1
        return node.follow() if node.rank else node.lead(driver)
    except Stopped as stopped:
        return 128 + stopped.number
    finally:
        node.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

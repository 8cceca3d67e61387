"""What the ssh launcher runs on each node: `python -m ascendfactory.launch.node`, a launch that is led through its standard input.

The first line is the plan as JSON; later ones are `stop N` (a signal for the job) and `kill`. Where the input ends, the launcher or
the line to it is gone: the job saves a checkpoint and ends, as after SIGTERM. Steps and events go out as lines, errors to stderr.

With `--describe` it prints, as JSON, what the launcher must know before it starts anything.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

import psutil

from ascendfactory import __version__
from ascendfactory.core.lines import event_line, step_line
from ascendfactory.core.messages import UserError
from ascendfactory.core.plan import Plan
from ascendfactory.launch.place import DEFAULT_PORT
from ascendfactory.launch.start import start

READY_MARK = "@node "  # --describe: modules may print before it


def describe() -> dict[str, object]:
    """This node: version, addresses (without those of this machine to itself), and a port that is free with the next."""
    addresses = [found.address for name in psutil.net_if_addrs().values() for found in name if found.family == socket.AF_INET]
    return {"version": __version__, "addresses": [found for found in addresses if not found.startswith("127.")], "port": free_port()}


def free_port() -> int:
    """The first port from 29500 on that is free together with the next."""
    for port in range(DEFAULT_PORT, DEFAULT_PORT + 1000, 2):
        try:
            for number in (port, port + 1):
                socket.create_server(("", number)).close()
        except OSError:
            continue
        return port
    raise UserError("MASTER_PORT", "no free pair of ports from 29500 to 30500", "29500 到 30500 之间没有空闲的端口对")


def main() -> int:
    """Launches the plan on the first line; returns the exit code."""
    if "--describe" in sys.argv:
        print(READY_MARK + json.dumps(describe()), flush=True)
        return 0
    plan = Plan.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_obey, daemon=True).start()
    try:
        return start(plan, on_step=lambda step: _say(step_line(step)), on_event=lambda event: _say(event_line(event)))
    except UserError as error:
        print(error.line(), file=sys.stderr, flush=True)
        return 2


def _obey() -> None:
    """Turns the launcher's words into the signals that a person's keys would send."""
    for line in sys.stdin:
        match line.split():
            case ["stop", number]:
                os.kill(os.getpid(), int(number))
            case ["kill"]:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.5)  # two that come together are one to Python
    os.kill(os.getpid(), signal.SIGTERM)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

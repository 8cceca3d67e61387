"""A back end's program without a framework: prints steps, sleeps, crashes, ignores signals, leaves processes behind.

Usage: fake_engine.py WHAT [FILE [NODE_RANK]]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FACTS = {"lr": 1e-5, "grad_norm": 1.0, "label_tokens": 10, "tokens": 20, "epoch": 0.1, "step_s": 0.5, "tokens_per_s": 40.0}


def say_step(step: int, num_steps: int) -> str:
    line = json.dumps({"step": step, "num_steps": num_steps, "loss": 3.0 / step, **FACTS})
    print("@step " + line, flush=True)
    return line


def sleep_for_ever() -> None:
    while True:
        time.sleep(0.05)


def main(what: str, file: str | None) -> int:
    if what == "train":  # FILE is a plan.json: leaves what the real engine leaves
        folder = Path(str(file)).parent
        (folder / "export").mkdir()
        with (folder / "metrics.jsonl").open("a") as metrics:
            for step in (1, 2, 3):
                metrics.write(say_step(step, 3) + "\n")
    elif what == "steps":
        for step in (1, 2, 3):
            say_step(step, 3)
        print("@event " + json.dumps({"kind": "exported", "text_en": "done", "text_zh": "完成"}, ensure_ascii=False), flush=True)
        print("@event {broken", "plain words", os.environ["OMP_NUM_THREADS"], sep="\n", flush=True)
        print("a warning", file=sys.stderr)
    elif what == "user_error":
        print("data.train: no such file a.jsonl", file=sys.stderr)
        return 2
    elif what == "crash":
        say_step(1, 3)
        raise RuntimeError("the weights ran away")
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "polite":
        told: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        say_step(1, 3)
        while not told:
            time.sleep(0.02)
        print("@event " + json.dumps({"kind": "stopped", "text_en": f"saved after {told}", "text_zh": ""}), flush=True)
    elif what == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say_step(1, 3)
        sleep_for_ever()
    elif what == "once":  # fails the first time that it is run with FILE
        if not Path(str(file)).exists():
            Path(str(file)).touch()
            raise RuntimeError("a cosmic ray")
        say_step(1, 1)
    elif what == "orphan":  # a child in a session of its own that holds the pipes open
        child = subprocess.Popen([sys.executable, __file__, "stubborn"], start_new_session=True)
        Path(str(file)).write_text(str(child.pid))
        time.sleep(0.3)
    return 0


if __name__ == "__main__":
    words = sys.argv[1].split(",")  # of several, each node takes its own: WHAT0,WHAT1 FILE NODE_RANK
    mine = words[int(sys.argv[3])] if len(words) > 1 else words[0]
    sys.exit(main(mine, sys.argv[2] if len(sys.argv) > 2 else None))

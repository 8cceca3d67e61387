"""Our own time between `ascendfactory train` and the start of the framework's process.

    python benchmarks/launch_overhead.py [--repeats 5] [--target 1.0]

The framework is a stand-in: an environment whose Python only notes when it was started and what its parents had used until then.
Printed for each back end: CPU seconds of `ascendfactory train` itself, those of the steps before training that are ours (rewriting
the data), and the wall clock. A second launch of the same recipe, whose data are rewritten already, is measured too. Exit code 1
where the CPU time of our own process is above the target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# Stands in for the Python of an environment: clock, and the CPU ticks of its parent (own, and of the children it waited for).
STAND_IN = """#!/bin/bash
set -- $(date +%s.%N) $(cut -d' ' -f14-17 /proc/$PPID/stat)
echo "$@" > "$LAUNCH_OVERHEAD_OUT"
"""
RECIPE = "model: ./m\ndata: {train: d.jsonl, seq_len: 512}\nbatch: 2\nduration: 2 steps\ncluster: 1 cpu\nbackend: llamafactory\n"
NUM_SAMPLES = 1000


def prepare(folder: Path) -> dict[str, str]:
    """Model, data, recipe and the stand-in's environment in a folder; the environment variables of a launch."""
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps(CONFIG))
    samples = (json.dumps({"instruction": f"What is {i} + {i}?", "output": str(2 * i)}) + "\n" for i in range(NUM_SAMPLES))
    (folder / "d.jsonl").write_text("".join(samples))
    (folder / "r.yaml").write_text(RECIPE)
    python = folder / "environments" / "llamafactory-0.9.5" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (python.parent.parent / "environment.json").write_text("{}\n")
    return os.environ | {
        "ASCENDFACTORY_ENVIRONMENTS": str(folder / "environments"),
        "LAUNCH_OVERHEAD_OUT": str(folder / "out.txt"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


def launch(folder: Path, env: dict[str, str]) -> tuple[float, float, float]:
    """One launch: CPU seconds of our process, of our steps before training, and wall-clock seconds until the framework starts."""
    began = time.time()
    argv = [sys.executable, "-c", "from ascendfactory.cli import main; main()", "train", "r.yaml"]
    subprocess.run(argv, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    clock, *ticks = (folder / "out.txt").read_text().split()
    own, system, steps, steps_system = (int(tick) / os.sysconf("SC_CLK_TCK") for tick in ticks)
    return own + system, steps + steps_system, float(clock) - began


def main() -> int:
    """Prints the median of each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--target", type=float, default=1.0, help="greatest CPU seconds of our own process")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env = prepare(folder)
        first = launch(folder, env)
        again = [launch(folder, env) for _ in range(chosen.repeats)]
    cpu_s, steps_s, wall_s = (statistics.median(column) for column in zip(*again, strict=True))
    print(f"first launch (rewrites {NUM_SAMPLES} samples): own CPU {first[0]:.2f} s, steps {first[1]:.2f} s, wall {first[2]:.2f} s")
    print(f"median of {chosen.repeats} later launches:        own CPU {cpu_s:.2f} s, steps {steps_s:.2f} s, wall {wall_s:.2f} s")
    print(f"own CPU / target: {cpu_s / chosen.target:.2f} (target {chosen.target:g} s)")
    return 0 if cpu_s <= chosen.target else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time to the first new step: a fresh start with a warm cache against a resume at step N, map style and streaming.

    python benchmarks/resume.py [--samples 2000000] [--steps 100 10000 100000] [--rounds 3] [--folder FOLDER]

A tiny random model, 8 rows of one sample each a step (packing off), so that N steps have seen 8 N samples. Imports are not
counted. A fresh start and each resume take turns. The checkpoints come from the data path really going to step N.
Writing and tokenising two million samples takes a quarter of an hour; with --folder they are kept for the next time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import alpaca
import measure

import ascendfactory

NUM_ROWS = 8


def tiny_model(folder: Path) -> Path:
    """A random Llama of 1.6 M parameters with the demo model's tokenizer and its own, small vocabulary head."""
    shutil.copytree(measure.MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_file(folder: Path, data: Path, model: Path, resume: str, streaming: bool) -> Path:
    """The plan of one start, in a run folder of its own."""
    folder.mkdir(parents=True)
    recipe = {
        "model": {"path": str(model), "init": "random", "dtype": "float32"},
        "data": {
            "train": str(data),
            "seq_len": 256,
            "packing": False,
            "streaming": streaming,
            "cache_dir": str(data.parent / "tokens"),
        },
        "batch": {"global_size": NUM_ROWS, "micro_size": NUM_ROWS},
        "duration": "1000000 steps",
        "cluster": {"device": "cpu", "nproc": 1},
        "checkpoint": {"resume": resume, "every": "1000000 steps"},
        "output": {"dir": str(folder), "export": False},
    }
    plan = ascendfactory.make_plan(ascendfactory.load_recipe(json.dumps(recipe)))
    file = folder / "plan.json"
    file.write_text(plan.model_dump_json())
    return file


def start(plan: Path, *arguments: str) -> dict[str, float]:
    """One start in a process of its own; seconds."""
    argv = [sys.executable, str(measure.HERE / "first_step.py"), str(plan), *arguments]
    ended = measure.run_child(argv, plan.with_suffix(".log"), 1)
    seconds: dict[str, float] = json.loads(ended.log.strip().splitlines()[-1])
    return seconds


def measure_style(work: Path, data: Path, model: Path, args: argparse.Namespace, *, streaming: bool) -> list[dict[str, Any]]:
    """A row of the table for the fresh start and for every N."""
    style = "streaming" if streaming else "map"
    checkpoints = {"fresh": "none"}
    for step in args.steps:
        folder = work / f"{style}-save-{step}"
        start(plan_file(folder, data, model, "none", streaming), "--save", str(step))
        checkpoints[f"N = {step}"] = str(next((folder / "checkpoints").glob("step-*")))
        print(f"{style}: checkpoint at step {step} ready", flush=True)
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(args.rounds):
        for name, checkpoint in checkpoints.items():
            folder = work / f"{style}-{number}-{name.replace(' ', '')}"
            runs[name].append(start(plan_file(folder, data, model, checkpoint, streaming)))
    fresh = {key: median(run[key] for run in runs["fresh"]) for key in ("wall_s", "cpu_s")}
    rows = []
    for name, ended in runs.items():
        wall_s, cpu_s = (median(run[key] for run in ended) for key in ("wall_s", "cpu_s"))
        rows.append({
            "data": style, "start": name, "wall s": wall_s, "CPU s": cpu_s,
            "wall / fresh": wall_s / fresh["wall_s"], "CPU / fresh": cpu_s / fresh["cpu_s"],
        })  # fmt: skip
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep the data, their tokens and the model here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        kept: Path = args.folder or Path(folder)
        data, model = kept / "data" / "bench.jsonl", kept / "model"
        if not data.exists():
            data.parent.mkdir(parents=True)
            alpaca.write(data, args.samples)
        if not model.exists():
            tiny_model(model)
        styles = (False, True)
        rows = [row for streaming in styles for row in measure_style(Path(folder), data, model, args, streaming=streaming)]
    print(measure.table(rows))
    print(measure.write_result("resume", {"num_samples": args.samples, "rows_a_step": NUM_ROWS, "figures": rows}))


if __name__ == "__main__":
    main()

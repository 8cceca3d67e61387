"""Full SFT of SmolLM2-135M on short samples: ours and LLaMA-Factory 0.9.5, side by side in one run.

    python benchmarks/sft_speed.py --llamafactory VENV [--rounds 3] [--steps 6] [--threads 2] [--only NAME ...]

Each round runs every variant once, in turn, forwards and then backwards, so that a busy machine strikes all alike.
All use fp32, the same file, AdamW, rows of 512 tokens. "Trained tokens" are all tokens that are not padding.
The first two steps of a run are not counted. CPU time per token is the steadier figure on a shared machine.
Share of peak: 6 x parameters x tokens/s, over the best fp32 matrix product measured here in the same round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alpaca
import measure
import psutil
import yaml

SEQ_LEN = 512
NUM_SAMPLES = 1000
NUM_WARM_STEPS = 2
NUM_PARAMS = 134_515_008  # embedding and head are tied, counted once: it is the head's matrix product

LLAMAFACTORY = {
    "lf default": {"per_device_train_batch_size": 4},
    "lf best": {"per_device_train_batch_size": 1, "packing": True, "disable_gradient_checkpointing": True},
    "lf best, 4 rows": {"per_device_train_batch_size": 4, "packing": True, "disable_gradient_checkpointing": True},
}
OURS = {"ours, 1 row": 1, "ours, 4 rows": 4}
OUR_COMMAND = "from ascendfactory.cli import main; raise SystemExit(main())"


@dataclass(frozen=True)
class Speed:
    """One variant in one round."""

    tokens_per_s: float
    cpu_ms_per_token: float
    peak_rss_bytes: int


def llamafactory_settings(options: dict[str, Any], data: Path, out: Path, num_steps: int) -> dict[str, Any]:
    """What a LLaMA-Factory user would write; the model's own chat template is taken because none is named."""
    info = {"bench": {"file_name": data.name}}
    (data.parent / "dataset_info.json").write_text(json.dumps(info))
    return {
        "stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": str(measure.MODEL),
        "dataset": "bench", "dataset_dir": str(data.parent), "cutoff_len": SEQ_LEN, "output_dir": str(out), "max_steps": num_steps,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "seed": 1,
    } | options  # fmt: skip


def run_llamafactory(python: Path, options: dict[str, Any], data: Path, work: Path, num_steps: int, num_threads: int) -> Speed:
    """One job in its own environment."""
    settings, steps = work / "settings.json", work / "steps.jsonl"
    settings.write_text(json.dumps(llamafactory_settings(options, data, work / "out", num_steps)))
    argv = [str(python), str(measure.HERE / "llamafactory_train.py"), str(settings), str(steps)]
    ended = measure.run_child(argv, work / "log.txt", num_threads)
    records = [json.loads(line) for line in steps.read_text().splitlines()]
    counted = [record for record in records if isinstance(record["step"], int)][NUM_WARM_STEPS:]
    return _speed(counted[0], counted[-1], ended.peak_rss_bytes)


def _speed(first: dict[str, Any], last: dict[str, Any], peak_rss_bytes: int) -> Speed:
    num_tokens = last["tokens"] - first["tokens"]
    cpu_ms = 1000 * (last["cpu_s"] - first["cpu_s"]) / num_tokens
    return Speed(num_tokens / (last["time"] - first["time"]), cpu_ms, peak_rss_bytes)


def recipe(data: Path, run_dir: Path, num_rows: int, num_steps: int) -> dict[str, Any]:
    """The same work as our users would write it."""
    return {
        "name": "bench",
        "model": {"path": str(measure.MODEL), "dtype": "float32"},
        "objective": "sft",
        "tuning": "full",
        "data": {"train": str(data), "seq_len": SEQ_LEN, "cache_dir": str(data.parent / "tokens")},
        "batch": {"global_size": num_rows, "micro_size": num_rows},
        "duration": f"{num_steps} steps",
        "optim": {"lr": 1e-5},
        "cluster": {"device": "cpu", "nproc": 1},
        "checkpoint": {"every": "100000 steps", "resume": "none"},
        "output": {"dir": str(run_dir), "export": False},
    }


class CpuWatch(threading.Thread):
    """Notes a process tree's CPU seconds whenever a line is added to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.file = file
        self.notes: list[tuple[float, float]] = []  # (wall clock, CPU s) at each new line
        self.ended = threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self.ended.wait(0.02):
            num_lines = self.file.read_bytes().count(b"\n") if self.file.exists() else 0
            while len(self.notes) < num_lines:
                self.notes.append((time.time(), sum(_cpu_s(child) for child in me.children(recursive=True))))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def run_ours(num_rows: int, data: Path, work: Path, num_steps: int, num_threads: int) -> Speed:
    """One `ascendfactory train`, read from its metrics.jsonl."""
    run_dir, file = work / "run", work / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(data, run_dir, num_rows, num_steps)))
    watch = CpuWatch(run_dir / "metrics.jsonl")
    watch.start()
    ended = measure.run_child([sys.executable, "-c", OUR_COMMAND, "train", str(file)], work / "log.txt", num_threads)
    watch.ended.set()
    watch.join()
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    total, records = 0, []
    for step, (clock, cpu_s) in zip([m for m in metrics if "loss" in m], watch.notes, strict=False):
        total += step["tokens"]
        records.append({"time": clock, "cpu_s": cpu_s, "tokens": total})
    counted = records[NUM_WARM_STEPS - 1 :]  # a record stands at the end of its step
    return _speed(counted[0], counted[-1], ended.peak_rss_bytes)


def run_rounds(args: argparse.Namespace, work: Path) -> tuple[dict[str, list[Speed]], list[float]]:
    """Every variant once a round, the order turned round each time; and the machine's peak before each round."""
    data = work / "data" / "bench.jsonl"
    data.parent.mkdir()
    alpaca.write(data, NUM_SAMPLES, median_tokens=args.median_tokens, spread=args.spread)
    speeds: dict[str, list[Speed]] = defaultdict(list)
    peaks = []
    names = [name for name in (*LLAMAFACTORY, *OURS) if not args.only or name in args.only]
    for number in range(args.rounds):
        peaks.append(measure.matmul_peak(args.threads))
        for name in names if number % 2 == 0 else reversed(names):
            folder = work / f"{number}-{name.replace(' ', '-')}"
            folder.mkdir()
            if name in OURS:
                speed = run_ours(OURS[name], data, folder, args.steps, args.threads)
            else:
                python = args.llamafactory / "bin" / "python"
                speed = run_llamafactory(python, LLAMAFACTORY[name], data, folder, args.steps, args.threads)
            speeds[name].append(speed)
            print(f"round {number} {name}: {speed.tokens_per_s:.1f} tokens/s, {speed.cpu_ms_per_token:.1f} CPU ms a token", flush=True)
    return speeds, peaks


def report(speeds: dict[str, list[Speed]], peaks: list[float]) -> None:
    """Prints the table and the ratios that matter, and keeps them."""
    peak = max(peaks)
    rows: list[dict[str, Any]] = []
    for name, rounds in speeds.items():
        rate = measure.spread([speed.tokens_per_s for speed in rounds])
        cpu_ms = measure.spread([speed.cpu_ms_per_token for speed in rounds])
        rows.append({
            "variant": name, "tokens/s": rate["median"], "best": rate["max"], "CPU ms/token": cpu_ms["median"],
            "peak GiB": max(speed.peak_rss_bytes for speed in rounds) / 2**30, "share of peak": 6 * NUM_PARAMS * rate["median"] / peak,
        })  # fmt: skip
    print(measure.table(rows))
    by_name = {row["variant"]: row for row in rows}
    ratios = {
        f"{ours} / {theirs}": {
            "tokens/s": by_name[ours]["tokens/s"] / by_name[theirs]["tokens/s"],
            "CPU": by_name[theirs]["CPU ms/token"] / by_name[ours]["CPU ms/token"],
        }
        for ours in OURS
        for theirs in LLAMAFACTORY
        if ours in by_name and theirs in by_name
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['tokens/s']:.2f} x tokens/s, {ratio['CPU']:.2f} x less CPU a token")
    print(f"fp32 matrix product peak: {peak / 1e9:.1f} GFLOP/s")
    print(measure.write_result("sft_speed", {"variants": rows, "ratios": ratios, "matmul_peaks": peaks}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llamafactory", type=Path, required=True, help="environment made by llamafactory_env.sh")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--median-tokens", type=float, default=37.0, help="of an answer, see alpaca.py")
    parser.add_argument("--spread", type=float, default=1.0, help="of the lengths, see alpaca.py")
    parser.add_argument("--only", nargs="*", choices=[*LLAMAFACTORY, *OURS], help="variants to run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sft-speed-") as folder:
        report(*run_rounds(args, Path(folder)))


if __name__ == "__main__":
    main()

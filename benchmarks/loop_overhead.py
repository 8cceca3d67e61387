"""What our step loop costs over a bare PyTorch loop: same model, same packed batches, one process, in turn.

    python benchmarks/loop_overhead.py [--pairs 20] [--threads 2] [--rows 1]

Ours is the engine's own step, with data loading, counting, metrics, progress file and checks. The bare loop is given its
batches ready-made and does forward, backward, clip_grad_norm_ and fused AdamW, nothing else. Each pair of steps takes the
same batch; who goes first changes from pair to pair.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import alpaca
import measure
import torch
import yaml
from sft_speed import recipe

import ascendfactory

NUM_WARM_PAIRS = 2


class BareLoop:
    """Forward, backward, clip, AdamW on a copy of the model."""

    def __init__(self, model: Any, lr: float) -> None:
        self.model = copy.deepcopy(model)
        self.parameters = list(self.model.parameters())
        self.adamw = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, batches: list[Any], num_trained: int) -> None:
        for batch in batches:
            self.model(batch, 1.0 / num_trained).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)


def clocked(work: Any) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def pairs(folder: Path, num_pairs: int, num_rows: int) -> list[dict[str, tuple[float, float]]]:
    """(wall, CPU) seconds of our step and of the bare one, pair by pair."""
    from ascendfactory.engine.build import build
    from ascendfactory.engine.data.batch import count_trained_tokens
    from ascendfactory.engine.parallel.context import cut
    from ascendfactory.engine.trainer import StopSignal, train_step

    data = folder / "data.jsonl"
    alpaca.write(data, 40 * num_rows * 10)
    settings = recipe(data, folder / "run", num_rows, num_pairs + NUM_WARM_PAIRS)
    (folder / "run").mkdir()
    run = build(ascendfactory.make_plan(ascendfactory.load_recipe(yaml.safe_dump(settings))))
    bare, stop = BareLoop(run.model, settings["optim"]["lr"]), StopSignal()
    measured = []
    for number in range(num_pairs + NUM_WARM_PAIRS):
        here = run.data.state_dict()
        batches = run.data.next_step()
        run.data.load_state_dict(here)
        num_trained, local = count_trained_tokens(batches), [cut(batch, run.mesh) for batch in batches]
        work = {
            "ours": lambda: run.reporter.step(train_step(run, stop)),
            "bare": lambda local=local, num_trained=num_trained: bare.step(local, num_trained),
        }
        order = list(work) if number % 2 else list(reversed(work))
        measured.append({name: clocked(work[name]) for name in order})
    return measured[NUM_WARM_PAIRS:]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1, help="rows of 512 tokens a step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="loop-overhead-") as folder:
        measured = pairs(Path(folder), args.pairs, args.rows)
    rows: list[dict[str, Any]] = []
    for number, what in enumerate(("wall", "CPU")):
        ours, bare = ([pair[name][number] for pair in measured] for name in ("ours", "bare"))
        rows.append({
            "time": what, "ours ms": 1000 * median(ours), "bare ms": 1000 * median(bare),
            "ratio of medians": round(median(ours) / median(bare), 4),
            "median of ratios": round(median(a / b for a, b in zip(ours, bare, strict=True)), 4),
        })  # fmt: skip
    print(measure.table(rows))
    print(
        measure.write_result(
            "loop_overhead", {"num_pairs": args.pairs, "num_threads": args.threads, "num_rows": args.rows, "figures": rows}
        )
    )


if __name__ == "__main__":
    main()

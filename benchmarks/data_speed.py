"""Reading, tokenising and packing one file from nothing to rows: ours and LLaMA-Factory 0.9.5, in turn, on the same cores.

    python benchmarks/data_speed.py --llamafactory VENV [--samples 50000] [--workers 2] [--rounds 3]

Every run starts with empty caches; imports are not counted in wall time (they are in CPU time).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import alpaca
import measure
import yaml
from sft_speed import llamafactory_settings, recipe


def run_llamafactory(python: Path, data: Path, work: Path, num_workers: int) -> tuple[dict[str, Any], float]:
    """Its own loading step, with its packing; figures and CPU seconds."""
    options = {"packing": True, "preprocessing_num_workers": num_workers, "cache_dir": str(work / "cache"), "overwrite_cache": True}
    settings = work / "settings.json"
    settings.write_text(json.dumps(llamafactory_settings(options, data, work / "out", 1)))
    ended = measure.run_child([str(python), str(measure.HERE / "llamafactory_data.py"), str(settings)], work / "log.txt", 1)
    return json.loads(ended.log.strip().splitlines()[-1]), ended.cpu_s


def run_ours(data: Path, work: Path, num_workers: int) -> tuple[dict[str, Any], float]:
    """Our loading step; figures and CPU seconds."""
    settings = recipe(data, work / "run", 1, 1) | {"duration": "1 epochs"}
    settings["data"] |= {"cache_dir": str(work / "tokens"), "workers": num_workers}
    file = work / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    ended = measure.run_child([sys.executable, str(measure.HERE / "our_data.py"), str(file)], work / "log.txt", 1)
    return json.loads(ended.log.strip().splitlines()[-1]), ended.cpu_s


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llamafactory", type=Path, required=True, help="environment made by llamafactory_env.sh")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    runs: dict[str, list[tuple[dict[str, Any], float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="data-speed-") as folder:
        data = Path(folder) / "bench.jsonl"
        alpaca.write(data, args.samples)
        for number in range(args.rounds):
            for name in ("ours", "llamafactory") if number % 2 == 0 else ("llamafactory", "ours"):
                work = Path(folder) / f"{number}-{name}"
                work.mkdir()
                if name == "ours":
                    runs[name].append(run_ours(data, work, args.workers))
                else:
                    runs[name].append(run_llamafactory(args.llamafactory / "bin" / "python", data, work, args.workers))
    rows: list[dict[str, Any]] = []
    for name, ended in runs.items():
        wall_s = median(figures["wall_s"] for figures, _ in ended)
        rows.append({
            "who": name, "wall s": wall_s, "samples/s": args.samples / wall_s, "tokens/s": ended[0][0]["num_tokens"] / wall_s,
            "CPU s with imports": median(cpu_s for _, cpu_s in ended), "rows": ended[0][0]["num_rows"],
        })  # fmt: skip
    print(measure.table(rows))
    by_name = {row["who"]: row for row in rows}
    ratio = by_name["llamafactory"]["wall s"] / by_name["ours"]["wall s"]
    print(f"ours takes 1/{ratio:.2f} of the time")
    print(measure.write_result("data_speed", {"num_samples": args.samples, "num_workers": args.workers, "figures": rows, "ratio": ratio}))


if __name__ == "__main__":
    main()

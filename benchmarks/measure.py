"""What the benchmarks share: child processes with their cost, the machine's peak, tables and result files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MODEL = HERE.parent / "demo" / "model" / "SmolLM2-135M-Instruct-fp32"

PEAK_PROGRAM = """
import time, torch
best = 0.0
for m, k, n in ((2048, 576, 1536), (2048, 1536, 576), (2048, 2048, 2048)):
    a, b = torch.randn(m, k), torch.randn(k, n)
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        best = max(best, 2 * m * k * n / (time.perf_counter() - start))
print(best)
"""


@dataclass(frozen=True)
class Ended:
    """A child process that has ended well."""

    wall_s: float
    cpu_s: float  # user + system, with its own children
    peak_rss_bytes: int  # of the largest single process
    log: str


def environment(num_threads: int) -> dict[str, str]:
    """This process's environment, offline, with that many threads in every numerical library."""
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    quiet = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    return os.environ | threads | quiet | {"PYTHONPATH": str(HERE.parent)}


def run_child(argv: Sequence[str], log: Path, num_threads: int) -> Ended:
    """Runs a program to its end, its output in `log`.

    Raises:
        RuntimeError: it failed; the message holds the end of its output.
    """
    began = time.time()
    with log.open("wb") as output:
        child = subprocess.Popen(list(argv), stdout=output, stderr=subprocess.STDOUT, env=environment(num_threads))
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text(encoding="utf-8", errors="replace")
    if child.returncode != 0:
        raise RuntimeError(f"{argv} ended with status {child.returncode}:\n{text[-3000:]}")
    return Ended(time.time() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, text)


def matmul_peak(num_threads: int) -> float:
    """Best measured fp32 matrix-product rate of the machine, FLOP/s, in a process of its own."""
    found = subprocess.run([sys.executable, "-c", PEAK_PROGRAM], env=environment(num_threads), capture_output=True, text=True, check=True)
    return float(found.stdout)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table."""
    cells = [
        list(rows[0]),
        *(
            [f"{v:.3g}" if isinstance(v, float) and v < 100 else f"{v:,.0f}" if isinstance(v, float) else str(v) for v in row.values()]
            for row in rows
        ),
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Facts beside which the figures must be read; the load counts other programs' work too."""
    model_name = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "cpu": model_name or platform.machine(),
        "num_cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Keeps a benchmark's figures as results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"when": time.strftime("%Y-%m-%d"), "machine": machine()} | result, indent=1) + "\n", encoding="utf-8")
    return path

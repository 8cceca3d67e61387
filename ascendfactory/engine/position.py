"""Where a process is, left in a file that survives it: a killed process says nothing itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

LENGTH_BYTES = 64  # rewritten in place, so every position has the same length

Doing = Literal["start", "data", "compute", "update", "save", "evaluate", "export"]


class Position:
    """One line in `logs/position-rank<n>.json`, rewritten before each part of a step (microseconds; no flush to disk is needed,
    since the kernel keeps what a killed process wrote)."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        logs = run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._file = os.open(logs / f"position-rank{rank}.json", os.O_WRONLY | os.O_CREAT, 0o644)
        self.set(0, "start")

    def set(self, step: int, doing: Doing) -> None:
        """Notes the step (1 the first) and the part of it."""
        line = json.dumps({"step": step, "doing": doing})
        os.pwrite(self._file, line.ljust(LENGTH_BYTES - 1).encode() + b"\n", 0)

    def close(self) -> None:
        """Closes the file; the last position stays in it."""
        os.close(self._file)

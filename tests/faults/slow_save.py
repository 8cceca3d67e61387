"""`python -m tests.faults.slow_save plan.json`: the engine, with the last moment of every save stretched so that a kill can hit it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ascendfactory.engine import checkpoint
from ascendfactory.engine.__main__ import main

_real = checkpoint.finish_folder


def slow(temporary: Path, final: Path, checksums: Mapping[str, str]) -> None:
    (temporary.parent / "in-the-middle").touch()
    time.sleep(60)
    _real(temporary, final, checksums)


if __name__ == "__main__":
    checkpoint.finish_folder = slow
    sys.exit(main(sys.argv))

"""Holds rendered jobs against the parser and the validator of the framework they are for, which must be at hand.

    python tools/job_cells.py mindspeed_llm | grep '"profile": "2.2.0"' > jobs.jsonl
    python tools/check_jobs.py mindspeed_llm jobs.jsonl --source MindSpeed-LLM=DIR --source MindSpeed=DIR --source Megatron-LM=DIR

Run it with the Python of the framework's environment; for MindSpeed any Python with torch, transformers and hydra-core will do, what only
Ascend has being replaced by inert modules. A line of the output is a cell with its verdict: `accepted`, `rejected` (and what the
framework said) or `refused` (what AscendFactory said when asked for the job). Exit status 1: a job was rejected.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

FRAMEWORKS = ("llamafactory", "mindspeed_llm", "mindspeed_mm", "mindspeed_rl", "verl")


def verdict(parser: ModuleType, line: dict[str, Any], sources: dict[str, Path]) -> dict[str, Any]:
    """The cell of a line and what the framework says of its job; asked in a process of its own, whose state a validator may change."""
    if "refused" in line:
        return {"cell": line["cell"], "verdict": "refused", "why": line["refused"]}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        child = os.fork()
        if child == 0:
            with Path(os.devnull).open("w") as void, contextlib.redirect_stdout(void), contextlib.redirect_stderr(void):
                answer.write_text(said(parser, line, sources, Path(folder)))
            os._exit(0)
        os.waitpid(child, 0)
        why = answer.read_text() if answer.exists() else "the process ended without an answer"
    return {"cell": line["cell"], "verdict": "rejected" if why else "accepted"} | ({"why": why} if why else {})


def said(parser: ModuleType, line: dict[str, Any], sources: dict[str, Path], folder: Path) -> str:
    """What the framework objects to, in one line; empty if it takes the job."""
    try:
        parser.check(line, sources, folder)
    except SystemExit as stop:
        return f"its parser ended with status {stop.code}"
    except BaseException as error:  # whatever a validator raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return ""


def main() -> int:
    """Prints a verdict for every line of a file of jobs, and the sum on standard error."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("framework", choices=FRAMEWORKS)
    given.add_argument("jobs", type=Path)
    given.add_argument("--source", action="append", default=[], metavar="NAME=DIR", help="a checkout of a source of the profile")
    words = given.parse_args()
    sources = {name: Path(folder).resolve() for name, _, folder in (word.partition("=") for word in words.source)}
    lines = [json.loads(text) for text in words.jobs.read_text(encoding="utf-8").splitlines()]
    parser = importlib.import_module(f"parsers.{words.framework}")
    parser.prepare(sources)
    count: Counter[str] = Counter()
    for line in lines:
        found = verdict(parser, line, sources)
        count[found["verdict"]] += 1
        print(json.dumps(found, ensure_ascii=False), flush=True)
    print(", ".join(f"{number} {name}" for name, number in sorted(count.items())), file=sys.stderr)
    return 1 if count["rejected"] else 0


if __name__ == "__main__":
    sys.exit(main())

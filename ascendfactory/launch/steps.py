"""Steps of a job: which of them were made before from the same inputs."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from ascendfactory.core.plan import Step

MARK = ".made.json"  # inside an output folder, written when its step has ended well


def step_fingerprint(step: Step) -> str:
    """What the output depends on: the program, its environment and every file of its inputs (name, size, time of change)."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([step.argv, step.env, step.environment]).encode())
    for name in step.inputs:
        root = Path(name).expanduser()
        paths = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        for path in paths:
            stat = path.stat() if path.exists() else None
            digest.update(f"{path}\0{stat.st_size if stat else -1}\0{stat.st_mtime_ns if stat else 0}\0".encode())
    return digest.hexdigest()


def is_made(step: Step, fingerprint: str) -> bool:
    """Whether the output of this very step is there."""
    try:
        made = json.loads((Path(step.output) / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(made == {"step": step.name, "fingerprint": fingerprint})


def prepare(step: Step) -> None:
    """An empty folder for the output; what an earlier attempt left there would be taken for a part of it."""
    folder = Path(step.output)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def mark_made(step: Step, fingerprint: str) -> None:
    """Notes that the output is whole."""
    folder = Path(step.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(json.dumps({"step": step.name, "fingerprint": fingerprint}) + "\n", encoding="utf-8")

"""Where a run came from: versions, fingerprints, the state of the source tree."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("ascendfactory", "torch", "torch_npu", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def provenance(**fingerprints: Any) -> dict[str, Any]:
    """What is needed to say later what ran.

    Args:
        fingerprints: of data, tokenizer and template.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "git": git_state(Path(__file__).resolve().parent),
        **fingerprints,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the source tree and whether it has changes; None outside a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit, "changed": bool(git("status", "--porcelain"))} if commit else None

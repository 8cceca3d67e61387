"""Merges verl's newest checkpoint into a Hugging Face folder: python verl_export.py CHECKPOINTS BACKEND EXPORT_FOLDER"""

import subprocess
import sys
from pathlib import Path


def main():
    """Returns the merger's exit code."""
    checkpoints, backend, export = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    step = (checkpoints / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    actor = checkpoints / f"global_step_{step}" / "actor"
    merge = ["-m", "verl.model_merger", "merge", "--backend", backend, "--local_dir", str(actor), "--target_dir", export]
    return subprocess.run([sys.executable, *merge], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

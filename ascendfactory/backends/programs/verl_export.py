"""Makes a Hugging Face folder of verl's newest policy: python verl_export.py CHECKPOINTS ENGINE EXPORT_FOLDER

Under Megatron the bridge has saved one already, and there is nothing that verl's merger could read.
"""

import shutil
import subprocess
import sys
from pathlib import Path


def main():
    """Returns the merger's exit code, or 0 once the folder is copied."""
    checkpoints, engine, export = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    step = (checkpoints / "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    actor = checkpoints / f"global_step_{step}" / "actor"
    if engine == "megatron":
        shutil.copytree(actor / "model" / "huggingface", export, dirs_exist_ok=True)
        return 0
    merge = ["-m", "verl.model_merger", "merge", "--backend", engine, "--local_dir", str(actor), "--target_dir", export]
    return subprocess.run([sys.executable, *merge], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

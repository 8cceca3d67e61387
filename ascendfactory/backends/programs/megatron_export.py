"""Converts a Megatron checkpoint back, beside links to the model's own files, and leaves a whole Hugging Face folder.

    python megatron_export.py MODEL_FOLDER EXPORT_FOLDER -- CONVERTER ...

The converter wants the original folder as its target and drops the tokenizer; here it gets a copy of links, so that the original is
never written to, and every small file of the model is copied beside the new weights.
"""

import shutil
import subprocess
import sys
from pathlib import Path

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def main():
    """Returns the converter's exit code; the export folder is complete when it is 0."""
    model, export = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    command = sys.argv[sys.argv.index("--") + 1 :]
    work = export.with_name(export.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for path in model.iterdir():
        (work / path.name).symlink_to(path)
    command = [word.replace("{target}", str(work)) for word in command]
    if command[0] == "python":
        command[0] = sys.executable
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    made = work / "mg2hg" if (work / "mg2hg").is_dir() else work
    export.mkdir(parents=True, exist_ok=True)
    for path in list(made.iterdir()):
        if path.is_file() and not path.is_symlink():
            shutil.move(str(path), str(export / path.name))
    for path in model.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS) and not (export / path.name).exists():
            shutil.copy2(path, export / path.name)
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())

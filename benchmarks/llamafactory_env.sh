#!/usr/bin/env bash
# Makes a CPU-only virtual environment with LLaMA-Factory 0.9.5 for the side-by-side benchmarks.
#   benchmarks/llamafactory_env.sh FOLDER [PYTHON]
# A plain `pip install llamafactory` brings torchvision and torchaudio, and with them a CUDA build of torch (several GB)
# whose libraries do not match the CPU one. Text training needs neither, so the package goes in without its dependencies
# and those that text training imports are named here, at the versions that pip would have chosen.
set -euo pipefail
folder=${1:?usage: benchmarks/llamafactory_env.sh FOLDER [PYTHON]}
python=${2:-python3.11}

"$python" -m venv "$folder"
pip="$folder/bin/pip --disable-pip-version-check"
# The first torch that lasts: every later package finds its requirement met by this CPU build.
$pip install "torch==2.13.0+cpu" --extra-index-url https://download.pytorch.org/whl/cpu
$pip install --no-deps llamafactory==0.9.5
$pip install transformers==5.6.0 datasets==4.0.0 accelerate==1.11.0 peft==0.18.1 trl==0.24.0 "tyro<0.9.0" \
    einops fire matplotlib omegaconf pandas protobuf psutil pydantic scipy sentencepiece tiktoken

# Its multimodal plug-in imports torchaudio at module level and uses it only to read sound files.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/torchaudio"
cat > "$site/torchaudio/__init__.py" <<'PY'
"""Stands in for torchaudio, which text training never calls."""
PY

DISABLE_VERSION_CHECK=1 "$folder/bin/python" - <<'PY'
import torch
from llamafactory.extras.env import VERSION
from llamafactory.train.tuner import run_exp

assert torch.version.cuda is None, "a CUDA build of torch slipped in"
print(f"LLaMA-Factory {VERSION} with torch {torch.__version__}: {run_exp.__module__} imports")
PY

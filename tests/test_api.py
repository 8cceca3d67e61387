"""The Python API: light to import, and every name is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ascendfactory


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, ascendfactory; print([m for m in ('torch', 'pydantic', 'typer', 'rich', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_name_is_there_and_a_wrong_one_is_told() -> None:
    for name in ("load_recipe", "make_plan", "start"):
        assert callable(getattr(ascendfactory, name))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ascendfactory.trian  # noqa: B018


def test_a_recipe_is_planned_in_two_calls() -> None:
    recipe = ascendfactory.load_recipe("model: smollm2-135m\ndata: d.jsonl\ncluster: cpu", ["--seed=7"])
    plan = ascendfactory.make_plan(recipe, run_dir="elsewhere")
    assert (plan.recipe.seed, plan.run_dir, plan.backend, plan.cluster.num_devices) == (7, "elsewhere", "native", 1)

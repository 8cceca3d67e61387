"""A recipe for every tick of the support tables, and its golden plan: after a change of the planner, `python recipes/generate.py`
writes both anew, and the diff is what a reviewer reads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from ascendfactory.catalog.read import find_card
from ascendfactory.catalog.tables import support
from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden" / "plans").glob("*.json"))


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_recipes", ROOT / "recipes" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_tick_has_a_recipe_and_no_recipe_is_left_over() -> None:
    module = generator()
    wanted = {module.stem(card, stage) for card, stage in module.ticks()}
    written = {path.stem for path in (ROOT / "recipes").glob("*_4k.yaml")}
    assert wanted == written
    assert len(wanted) > 120
    planned = {stem for path in GOLDEN for stem in json.loads(path.read_text(encoding="utf-8"))}
    assert planned == wanted


def test_no_tick_of_the_tables_is_forgotten() -> None:
    """Read from the shipped table itself, model by model, without the generator's way through the cards."""
    module = generator()
    ticked = {(row.model, stage) for row in support() for stage in row.stages}
    assert {stage for _, stage in ticked} == set(module.STAGES)
    found = set()
    for path in (ROOT / "recipes").glob("*_4k.yaml"):
        recipe = load_recipe(path.read_text(encoding="utf-8"))
        kind, tuning = recipe.objective.kind, recipe.tuning.kind
        found.add((find_card(recipe.model.path).name, f"sft_{tuning}" if kind == "sft" else kind))
    assert ticked == found


def test_every_recipe_loads_and_its_data_are_here() -> None:
    for path in (ROOT / "recipes").glob("*_4k.yaml"):
        recipe = read_recipe(str(path))
        assert all((ROOT / source.path).exists() for source in recipe.data.train)
        assert find_card(recipe.model.path).name.lower() == path.stem.split("_")[0]
        assert f"_{recipe.objective.kind}-{recipe.tuning.kind}_" in path.stem


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_plans_are_golden(path: Path) -> None:
    module = generator()
    assert module.dump(module.golden(find_card(path.stem))) == path.read_text(encoding="utf-8")

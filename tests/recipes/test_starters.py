"""Every recipe that is shipped loads, names data that are there, and is planned as its name says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ascendfactory.backends import BACKENDS
from ascendfactory.catalog.read import find_card
from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.plan import Cluster
from ascendfactory.planner.search import make_plan
from tests.examples import CPU

ROOT = Path(__file__).resolve().parents[2]
STARTERS = sorted((ROOT / "recipes").glob("*xcpu.yaml"))
# <model>_<objective>-<tuning>_<length>_<count>x<device>.yaml
NAME = re.compile(r"^(?P<model>[\w.\-]+?)_(?P<objective>[a-z]+)-(?P<tuning>[a-z]+)_(?P<length>\d+k?)_(?P<count>\d+)x(?P<device>[\w.\-]+)$")


def test_there_are_starters_for_the_three_ways_of_training() -> None:
    ways = {(found["objective"], found["tuning"]) for path in STARTERS if (found := NAME.match(path.stem))}
    assert ways == {("sft", "lora"), ("sft", "full"), ("pretrain", "full")}


@pytest.mark.parametrize("path", [*STARTERS, ROOT / "demo" / "recipe.yaml"], ids=lambda path: path.stem)
def test_recipe_loads_and_its_data_are_here(path: Path) -> None:
    recipe = read_recipe(str(path))
    for source in recipe.data.train:
        assert (ROOT / source.path).exists()
    assert Path(recipe.model.path).parts[:2] == ("demo", "model")  # which demo/smollm2.py makes


@pytest.mark.parametrize("path", STARTERS, ids=lambda path: path.stem)
def test_name_tells_what_is_planned(path: Path) -> None:
    recipe, name = read_recipe(str(path)), NAME.match(path.stem)
    assert name is not None
    card = find_card(name["model"])
    assert Path(recipe.model.path).name.lower().startswith(name["model"])
    assert recipe.cluster.device == CPU.name  # a small one: 8 GiB, no bfloat16
    plan = make_plan(recipe, card, Cluster(device=CPU, nodes=1, nproc=1), BACKENDS, "runs/x")
    assert (plan.recipe.objective.kind, plan.recipe.tuning.kind) == (name["objective"], name["tuning"])
    assert plan.recipe.data.seq_len == int(name["length"].removesuffix("k")) * (1024 if name["length"].endswith("k") else 1)
    assert (plan.cluster.num_devices, plan.cluster.device.name) == (int(name["count"]), name["device"])
    assert plan.backend == "native"

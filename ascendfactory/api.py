"""What a person plans with from Python, in one call each; `ascendfactory` hands these out when they are first used."""

from __future__ import annotations

from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Plan
from ascendfactory.core.recipe import Recipe

__all__ = ["load_recipe", "make_plan"]


def make_plan(recipe: Recipe, run_dir: str | None = None) -> Plan:
    """The plan of a recipe on the devices it names, with the card of its model and every back end of this release.

    Args:
        recipe: from `load_recipe`.
        run_dir: where the run will go; by default the recipe's output.dir, or runs/<name>.

    Raises:
        NoPlan: with every reason and what would mend it.
        UserError: for a model or a device that is not known.
    """
    from ascendfactory.backends import BACKENDS
    from ascendfactory.catalog.read import find_card, find_device
    from ascendfactory.launch.devices import resolve_cluster
    from ascendfactory.launch.runs import run_dir_of
    from ascendfactory.planner import search

    card = find_card(recipe.model.path)
    cluster = resolve_cluster(recipe.cluster, find_device)
    return search.make_plan(recipe, card, cluster, BACKENDS, run_dir or run_dir_of(recipe))

"""What a person plans with from Python, in one call each; `ascendfactory` hands these out when they are first used."""

from __future__ import annotations

from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import NoPlan, Plan
from ascendfactory.core.recipe import Recipe

__all__ = ["load_recipe", "make_plan"]


def make_plan(recipe: Recipe, run_dir: str | None = None, *, launchable: bool = True, num_alternatives: int = 5) -> Plan:
    """The plan of a recipe on the devices it names, with the card of its model.

    Args:
        recipe: from `load_recipe`.
        run_dir: where the run will go; by default the recipe's output.dir, or runs/<name>.
        launchable: whether the plan is to be run. `False` plans a recipe that names no back end, and that the embedded engine
            refuses, with the outside engines: the plan then says which one to name.
        num_alternatives: how many of the next best layouts the plan tells.

    Raises:
        NoPlan: with every reason and what would mend it.
        UserError: for a model or a device that is not known.
    """
    from ascendfactory.backends import BACKENDS
    from ascendfactory.catalog.read import find_card, find_device
    from ascendfactory.launch.devices import resolve_cluster
    from ascendfactory.launch.runs import run_dir_of
    from ascendfactory.planner import search
    from ascendfactory.planner.priced import priced_engines

    card = find_card(recipe.model.path)
    cluster = resolve_cluster(recipe.cluster, find_device)
    folder = run_dir or run_dir_of(recipe)
    # Of itself a recipe runs on the embedded engine; the others need an environment, and are taken when they are named.
    chosen = {"native": BACKENDS["native"]} if recipe.backend == "auto" else dict(BACKENDS)
    try:
        return search.make_plan(recipe, card, cluster, chosen, folder, num_alternatives)
    except NoPlan as no:
        if launchable or recipe.backend != "auto":
            raise
        try:
            plan = search.make_plan(recipe, card, cluster, priced_engines(), folder, num_alternatives)
        except NoPlan as none:
            close = [r for r in none.refusals if not r.code.endswith(".stage")]  # engines that train this model, but not so
            said = {r.code for r in no.refusals if r.code != "memory"}  # a rule is told once, a number of bytes for each engine
            raise NoPlan([*no.refusals, *(r for r in close if r.code not in said)]) from None
        return plan.model_copy(update={"refused": [*no.refusals, *plan.refused]})

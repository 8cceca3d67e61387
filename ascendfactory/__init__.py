"""AscendFactory: one recipe, any engine.

The Python API, loaded when first used:

    recipe = ascendfactory.load_recipe(text)      # YAML → Recipe
    plan = ascendfactory.make_plan(recipe)        # every decision taken; NoPlan says why not
    ascendfactory.start(plan)                     # processes, run folder, report
    for step in ascendfactory.train_steps(plan):  # or: train inside this process
        ...

`ascendfactory.launch.local.launch` runs a single job, without a run folder's plan and report.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Named by text: an import statement here would make every layer depend on every other.
_HOMES = {
    "load_recipe": "ascendfactory.api",
    "make_plan": "ascendfactory.api",
    "start": "ascendfactory.launch.start",
    "train_steps": "ascendfactory.engine.trainer",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ascendfactory' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)

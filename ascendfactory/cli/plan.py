"""`ascendfactory plan`: every decision and its reason, before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.messages import pick


def plan(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=pick("recipe file; settings may follow: --optim.lr=1e-5", "配方文件；其后可跟设置项：--optim.lr=1e-5"))
    ],
    json_out: Annotated[bool, typer.Option("--json", help=pick("print the plan as JSON", "以 JSON 输出计划"))] = False,
) -> None:
    """Show how a recipe will run, and why."""
    from ascendfactory.api import make_plan

    made = make_plan(read_recipe(recipe, context.args, ["--json"]))
    if json_out:
        typer.echo(made.model_dump_json(indent=2))
        return
    from rich.console import Console

    from ascendfactory.planner.explain import render

    Console(highlight=False).print(render(made))

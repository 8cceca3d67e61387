"""`ascendfactory schema`: completion and checks in an editor."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ascendfactory.core.messages import pick


def schema(
    of_plan: Annotated[
        bool, typer.Option("--plan", help=pick("of what 'plan --json' prints instead", "改为 'plan --json' 输出的 Schema"))
    ] = False,
) -> None:
    """Print the JSON Schema of recipes."""
    if of_plan:
        from ascendfactory.core.plan import Plan

        found = Plan.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    else:
        from ascendfactory.core.load import recipe_schema

        found = recipe_schema()
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False))

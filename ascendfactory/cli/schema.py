"""`ascendfactory schema`: completion and checks in an editor."""

from __future__ import annotations

import json

import typer

from ascendfactory.core.load import recipe_schema


def schema() -> None:
    """Print the JSON Schema of recipes."""
    typer.echo(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))

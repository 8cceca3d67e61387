"""`ascendfactory data preview`: samples as the model will see them."""

from __future__ import annotations

from typing import Annotated

import typer

from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.messages import pick

app = typer.Typer(add_completion=False, rich_markup_mode=None, help=pick("Look at the data of a recipe.", "查看配方的数据。"))


@app.callback()
def _group() -> None:
    """Makes `preview` a word of its own though it is alone."""


@app.command(
    help=pick("Show samples with the trained tokens marked.", "显示样本，并标出参与训练的词元。"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def preview(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help=pick("recipe file; settings may follow", "配方文件；其后可跟设置项"))],
    num: Annotated[int, typer.Option("-n", "--num", min=1, help=pick("samples to show", "显示的样本数"))] = 3,
) -> None:
    """Show samples with the trained tokens marked."""
    read = read_recipe(recipe, context.args, ["--num"])
    from rich.console import Console

    from ascendfactory.engine.data.preview import preview as look
    from ascendfactory.engine.data.preview import render
    from ascendfactory.engine.data.tokenizer import load_tokenizer

    Console(highlight=False).print(render(look(read, load_tokenizer(read.model.path, read.data.chat_template), num)))

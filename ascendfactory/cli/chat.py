"""`ascendfactory chat`: a first look at a trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from ascendfactory.core.messages import pick


def chat(
    folder: Annotated[
        str, typer.Argument(help=pick("a Hugging Face folder, such as runs/NAME/export", "Hugging Face 文件夹，如 runs/NAME/export"))
    ],
    prompt: Annotated[str | None, typer.Option(help=pick("ask once and end", "只问一句"))] = None,
) -> None:
    """Talk to a model."""
    from ascendfactory.engine.chat import chat as talk

    talk(folder, prompt)

"""`ascendfactory compare`: one recipe on two engines, step beside step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ascendfactory.cli.recipes import read_recipe
from ascendfactory.core.messages import UserError, pick

if TYPE_CHECKING:
    from ascendfactory.launch.compare import Comparison

OPTIONS = ["--backends", "--steps", "--tolerance", "--output"]


def compare(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help=pick("recipe file; settings may follow: --optim.lr=1e-5", "配方文件；其后可跟设置项"))],
    backends: Annotated[str, typer.Option(help=pick("the two engines", "两个引擎"))] = "native,llamafactory",
    steps: Annotated[int, typer.Option(help=pick("optimizer steps", "优化步数"))] = 20,
    tolerance: Annotated[
        float, typer.Option(help=pick("greatest difference of losses that counts as none", "可视为一致的最大损失差"))
    ] = 1e-3,
    output: Annotated[str, typer.Option(help=pick("folder of the comparison", "结果文件夹"))] = "",
) -> int:
    """Run a recipe on two engines and say where they part: 0 they agree, 1 they differ, 2 something to mend."""
    from ascendfactory.api import make_plan
    from ascendfactory.launch.compare import compare as run

    names = [name.strip() for name in backends.split(",") if name.strip()]
    if len(names) != 2:
        raise UserError(
            "--backends", f"name two: native,llamafactory; not {len(names)}", f"请写两个：native,llamafactory；而非 {len(names)} 个"
        )
    if steps < 1 or not tolerance >= 0:
        raise UserError("--steps", "write 1 or more, and a tolerance of 0 or more", "步数须不小于 1，容差须不小于 0")
    read = read_recipe(recipe, context.args, OPTIONS)
    folder = Path(output or f"runs/compare-{read.name}")
    made = run(
        read,
        (names[0], names[1]),
        folder,
        make_plan=make_plan,
        num_steps=steps,
        tolerance=tolerance,
        on_step=lambda name, step: typer.echo(f"{name} {step.step}/{steps}  {pick('loss', '损失')} {step.loss:.4f}"),
        on_event=lambda event: typer.echo(pick(event["text_en"], event["text_zh"])) if event["kind"] in ("failed", "step") else None,
    )
    _show(made)
    typer.echo(f"{pick('report', '报告')}: {folder / 'compare.html'}")
    return 0 if made.agree else 1


def _show(made: Comparison) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ascendfactory.launch.compare import head, state_word, table_rows, verdict

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in head(made):
        shown.add_column(title, justify="right")
    for row in table_rows(made):
        shown.add_row(*row)
    console = Console(highlight=False)
    console.print(shown)
    for item in made.checks:
        console.print(f"{item.name}: {state_word(item)} ({item.found})", markup=False)
    console.print(verdict(made), markup=False)

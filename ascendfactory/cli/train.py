"""`ascendfactory train`: from a recipe (or a plan.json) to a trained model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ascendfactory.cli.progress import Progress
from ascendfactory.cli.recipes import read_recipe, read_text
from ascendfactory.core.messages import UserError, pick
from ascendfactory.core.plan import Plan


def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help=pick(
                "recipe file, or a plan.json to repeat; settings may follow: --optim.lr=1e-5",
                "配方文件，或要重跑的 plan.json；其后可跟设置项",
            )
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help=pick("show the plan and the command; start nothing", "只显示计划与命令，不启动"))
    ] = False,
) -> int:
    """Run a recipe; the same command resumes it."""
    is_old = _is_old(recipe)
    plan = _plan_of(recipe, context.args, is_old)
    if dry_run:
        _show(plan)
        return 0
    from ascendfactory.launch.start import start

    def prepare(folder: Path) -> None:
        if is_old:
            from ascendfactory.cli.legacy import old_tree
            from ascendfactory.launch.old_names import keep_old_names

            keep_old_names(folder, plan, old_tree(recipe, context.args))

    with Progress(plan.recipe.output.log_every) as progress:
        code = start(plan, on_step=progress.step, on_event=progress.event, on_folder=prepare)
    if is_old:
        from ascendfactory.launch.old_names import link_picture

        link_picture(Path(plan.run_dir))
    last = progress.last
    _say_where(plan, finished=code == 0 and (last is None or last.step >= last.num_steps))
    return code


def _is_old(path: str) -> bool:
    """Whether a file is AscendFactory 6.5's own YAML."""
    from ascendfactory.launch.legacy import is_legacy

    return path != "-" and not path.endswith(".json") and is_legacy(read_text(path))


def _plan_of(path: str, arguments: list[str], is_old: bool) -> Plan:
    if path.endswith(".json"):
        from ascendfactory.launch.runs import read_plan

        if arguments:
            en = "a plan is run as it is; change the recipe instead"
            raise UserError(arguments[0], en, "计划按原样运行；请改用配方来修改设置")
        return read_plan(Path(path))
    from ascendfactory.api import make_plan

    if is_old:
        from ascendfactory.cli.legacy import legacy_recipe

        return make_plan(legacy_recipe(path, arguments))
    return make_plan(read_recipe(path, arguments, ["--dry-run"]))


def _show(plan: Plan) -> None:
    from rich.console import Console

    from ascendfactory.backends import BACKENDS
    from ascendfactory.planner.explain import render

    Console(highlight=False).print(render(plan))
    job = BACKENDS[plan.backend].render(plan)
    for task in (*job.before, job, *job.after):
        typer.echo("\n" + " ".join([*(f"{k}={shlex.quote(v)}" for k, v in task.env.items()), shlex.join(task.argv)]))


def _say_where(plan: Plan, finished: bool) -> None:
    """The lines after training: results, and what to do next."""
    folder = Path(plan.run_dir)
    lines = []
    if (folder / "report.html").exists():
        lines.append((pick("report", "报告"), str(folder / "report.html")))
    if finished and (folder / "export").is_dir():
        lines.append((pick("model", "模型"), str(folder / "export")))
        lines.append((pick("talk to it", "对话"), f"ascendfactory chat {shlex.quote(str(folder / 'export'))}"))
    for name, text in lines:
        typer.echo(f"{name}: {text}")

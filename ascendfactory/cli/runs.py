"""`ascendfactory runs`: what was trained, and what made the difference."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from ascendfactory.core.measured import measure
from ascendfactory.core.messages import UserError, pick
from ascendfactory.launch.runs import RUNS_ROOT, Run, diff_runs, flatten, list_runs, load_run, results_of

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help=pick("List, show and compare runs.", "列出、查看、比较训练。")
)
_RUN_HELP = pick("a run folder, or its name under runs/", "训练文件夹，或 runs/ 下的名称")


@app.command("list", help=pick("List the runs of a folder, the newest first.", "列出文件夹中的训练，新的在前。"))
def list_(root: Annotated[str, typer.Argument(help=pick("the folder that holds the runs", "存放训练的文件夹"))] = RUNS_ROOT) -> None:
    """List runs."""
    runs = list_runs(root)
    if not runs:
        raise UserError(root, "no runs here; 'ascendfactory train RECIPE' makes one", "此处没有训练；'ascendfactory train 配方' 可创建")
    head = (pick("run", "训练"), pick("model", "模型"), pick("method", "方法"), pick("state", "状态"), pick("steps", "步数"))
    rows = [(*_row(run), _loss(run.last.loss if run.last else None), _loss(run.eval_loss), _when(run.started_s)) for run in runs]
    _print_table((*head, pick("loss", "损失"), pick("eval", "评估"), pick("started", "开始时间")), rows)


@app.command(help=pick("Show one run.", "查看一次训练。"))
def show(run: Annotated[str, typer.Argument(help=_RUN_HELP)]) -> None:
    """Show one run."""
    found = load_run(run)
    shown = results_of(found) | {"folder": str(found.dir), "backend": found.plan.backend, "device": found.plan.cluster.device.title}
    shown |= _predicted(found)
    for name in ("export", "report.html", "loss.png"):
        if (found.dir / name).exists():
            shown[name] = str(found.dir / name)
    _print_table((pick("result", "结果"), found.plan.recipe.name), [(key, _text(value)) for key, value in shown.items()])
    written = flatten(found.plan.recipe.model_dump(mode="json"))
    _print_table((pick("setting", "设置"), ""), [(key, _text(value)) for key, value in written.items()])


@app.command(help=pick("Compare two runs: the settings that differ, and the results.", "比较两次训练：不同的设置与结果。"))
def diff(first: Annotated[str, typer.Argument(help=_RUN_HELP)], second: Annotated[str, typer.Argument(help=_RUN_HELP)]) -> None:
    """Compare two runs."""
    one, two = load_run(first), load_run(second)
    differing, results = diff_runs(one, two)
    names = (one.dir.name, two.dir.name)
    _print_table((pick("setting", "设置"), *names), differing or [(pick("(no difference)", "（无差异）"), "", "")])
    _print_table((pick("result", "结果"), *names), results)


def _predicted(run: Run) -> dict[str, str]:
    """What the planner had said, beside what the run measured."""
    measured, found = measure(run.plan, run.steps), {}
    if run.plan.prediction and measured:
        found["step_s (predicted)"] = f"{measured.step_s:.3f} ({run.plan.prediction.step_s:.3f} ±{run.plan.prediction.band:.0%})"
    if measured and measured.memory_bytes:
        found["peak_memory_gib (predicted)"] = f"{measured.memory_bytes / 2**30:.2f} ({run.plan.peak_bytes / 2**30:.2f})"
    return found


def _row(run: Run) -> tuple[str, ...]:
    recipe = run.plan.recipe
    steps = f"{run.last.step}/{run.last.num_steps}" if run.last else "-"
    return run.dir.name, run.plan.card.name, f"{recipe.objective.kind} {recipe.tuning.kind}", run.state, steps


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _print_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in head:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)

"""The same model, data and seed on two engines, step beside step: where they part, and which known cause is to blame.

What would make any two engines differ is set equal first: samples in the file's order, one a row (pre-training: packed), no dropout,
no evaluation; the rest of the recipe stays. Each engine runs as `train` runs it, in a folder of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ascendfactory.backends import BACKENDS
from ascendfactory.core.load import dump_recipe, load_recipe
from ascendfactory.core.messages import UserError, in_chinese, nearest, pick
from ascendfactory.core.plan import Fact, Plan, StepMetrics
from ascendfactory.core.recipe import Lora, Pretrain, Recipe
from ascendfactory.launch.causes import Check, Rows, all_checks, rows_of
from ascendfactory.launch.chart import Line as Curve
from ascendfactory.launch.chart import svg_chart
from ascendfactory.launch.environments import require_environment
from ascendfactory.launch.runs import read_metrics
from ascendfactory.launch.start import start
from ascendfactory.launch.style import CSS
from ascendfactory.launch.watch import INTERRUPTED, Event

ROWS_VARIABLE = "ASCENDFACTORY_TRAINED_ROWS"  # a back end's program writes the rows that it trains on into this file
ROWS_FILE = "trained_rows.jsonl"
_GRADIENT_FACTOR = 10  # gradient norms are sums over all weights: they may differ by this much more, relatively


class Parting(Fact):
    """The first step at which the engines differ by more than the tolerance."""

    step: int
    what: str  # loss or grad_norm
    values: tuple[float, float]


class Comparison(Fact):
    """Two engines, side by side."""

    recipe: str
    backends: tuple[str, str]
    num_steps: int
    tolerance: float
    steps: tuple[list[StepMetrics], list[StepMetrics]]
    parting: Parting | None
    checks: list[Check]

    @property
    def agree(self) -> bool:
        """Whether every step was reported by both, and none differs."""
        return self.parting is None and all(len(own) == self.num_steps for own in self.steps)


def compare(
    recipe: Recipe,
    backends: tuple[str, str],
    folder: Path,
    *,
    make_plan: Callable[[Recipe], Plan],
    num_steps: int,
    tolerance: float = 1e-3,
    on_step: Callable[[str, StepMetrics], None] = lambda name, step: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Comparison:
    """Runs a recipe on two engines, one after the other, and writes compare.json and compare.html into the folder.

    Args:
        recipe: what to train; its `backend` and `duration` are replaced.
        backends: names of the engines.
        folder: gets one run folder an engine; earlier ones of a comparison are replaced.
        make_plan: the planner.
        num_steps: optimizer steps.
        tolerance: greatest difference of a loss that counts as none; of gradient norms, relatively, 10 times as much.
        on_step: told each step, with the engine's name.
        on_event: told each other news of the runs.

    Raises:
        UserError: a back end that is not known or not installed, or a run that failed.
        NoPlan: an engine refuses the recipe; nothing has run then.
    """
    for name in backends:
        if name not in BACKENDS:
            near = nearest(name, BACKENDS) or ", ".join(BACKENDS)
            raise UserError("--backends", f"no back end '{name}'; write {near}", f"没有后端 '{name}'；请写 {near}")
    if backends[0] == backends[1]:
        raise UserError("--backends", f"name two back ends, not {backends[0]} twice", f"请写两个不同的后端，而非两次 {backends[0]}")
    places = [folder / name for name in backends]
    plans = [make_plan(equalised(recipe, name, num_steps, place)) for name, place in zip(backends, places, strict=True)]
    for name, plan in zip(backends, plans, strict=True):
        if environment := BACKENDS[name].render(plan).environment:
            require_environment(environment)  # before the other engine has run for nothing
    runs = []
    for name, place, plan in zip(backends, places, plans, strict=True):
        runs.append(_run(name, place, plan, lambda step, name=name: on_step(name, step), on_event))  # type: ignore[misc]
    rows = [_rows(name, place, plan, num_steps) for name, place, plan in zip(backends, places, plans, strict=True)]
    made = Comparison(
        recipe=recipe.name,
        backends=backends,
        num_steps=num_steps,
        tolerance=tolerance,
        steps=(runs[0], runs[1]),
        parting=parting(runs[0], runs[1], tolerance),
        checks=all_checks(backends, (plans[0], plans[1]), (rows[0], rows[1]), (runs[0], runs[1])),
    )
    (folder / "compare.json").write_text(json.dumps(as_json(made), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "compare.html").write_text(page(made), encoding="utf-8")
    return made


def equalised(recipe: Recipe, backend: str, num_steps: int, folder: Path) -> Recipe:
    """The recipe for one of the engines, without what each does its own way."""
    packing = "packed" if isinstance(recipe.objective, Pretrain) else "dynamic"
    settings: dict[str, Any] = {
        "backend": backend,
        "profile": recipe.profile if backend == recipe.backend else "auto",
        "extra": recipe.extra if backend == recipe.backend else {},
        "duration": f"{num_steps} steps",
        "data.shuffle": False,
        "data.packing": packing,
        "data.streaming": False,
        "data.eval": [],
        "data.eval_fraction": 0.0,
        "checkpoint.every": f"{num_steps} steps",
        "checkpoint.resume": "auto",
        "checkpoint.keep_best": False,
        "output.dir": str(folder),
        "output.export": False,
        "output.sample_prompts": [],
    }
    if isinstance(recipe.tuning, Lora):
        settings["tuning.dropout"] = 0.0
    return load_recipe(dump_recipe(recipe), [f"--{key}={json.dumps(value)}" for key, value in settings.items()])


def _run(
    name: str, folder: Path, plan: Plan, on_step: Callable[[StepMetrics], None], on_event: Callable[[Event], None]
) -> list[StepMetrics]:
    if (folder / "plan.json").exists():
        shutil.rmtree(folder)  # of an earlier comparison
    code = start(plan, on_step=on_step, on_event=on_event, env={ROWS_VARIABLE: str((folder / ROWS_FILE).absolute())})
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise UserError(name, f"its run ended with code {code}; see {folder}/logs", f"其训练以代码 {code} 结束；见 {folder}/logs")
    return read_metrics(folder)


def _rows(name: str, folder: Path, plan: Plan, num_steps: int) -> Rows:
    """What an engine was trained on: dumped by its program, or, of the embedded engine, read by its own loader again."""
    path = folder / ROWS_FILE
    if name == "native" and not path.exists():
        argv = [sys.executable, "-m", "ascendfactory.engine.data.trained", str(folder / "plan.json"), str(path), str(num_steps)]
        subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = sorted(folder.glob(f"{ROWS_FILE}*"))  # one file a process
    lines = [json.loads(line) for part in parts for line in part.read_text(encoding="utf-8").splitlines()]
    return rows_of(lines, num_steps)


def parting(first: Sequence[StepMetrics], second: Sequence[StepMetrics], tolerance: float) -> Parting | None:
    """The first step that differs; a loss by more than the tolerance, a gradient norm relatively by 10 times as much."""
    for a, b in zip(first, second, strict=False):
        if not abs(a.loss - b.loss) <= tolerance:
            return Parting(step=a.step, what="loss", values=(a.loss, b.loss))
        if not abs(a.grad_norm - b.grad_norm) <= _GRADIENT_FACTOR * tolerance * max(a.grad_norm, b.grad_norm):
            return Parting(step=a.step, what="grad_norm", values=(a.grad_norm, b.grad_norm))
    return None


def table_rows(made: Comparison) -> list[tuple[str, ...]]:
    """Step, both losses, their difference, both gradient norms, their relative difference."""
    found: list[tuple[str, ...]] = []
    for a, b in zip(*made.steps, strict=False):
        norm = max(a.grad_norm, b.grad_norm) or 1.0
        apart = (f"{a.loss - b.loss:+.1e}", f"{(a.grad_norm - b.grad_norm) / norm:+.1e}")
        found.append((str(a.step), f"{a.loss:.5f}", f"{b.loss:.5f}", apart[0], f"{a.grad_norm:.5f}", f"{b.grad_norm:.5f}", apart[1]))
    return found


def head(made: Comparison) -> tuple[str, ...]:
    """Titles of `table_rows`."""
    one, two = made.backends
    loss, norm = pick("loss", "损失"), pick("grad norm", "梯度范数")
    return (
        pick("step", "步"),
        f"{loss} {one}",
        f"{loss} {two}",
        pick("difference", "差"),
        f"{norm} {one}",
        f"{norm} {two}",
        pick("relative", "相对差"),
    )


def verdict(made: Comparison) -> str:
    """One line: agree, or where they part."""
    if made.agree:
        en = f"{' and '.join(made.backends)} agree in {made.num_steps} steps (loss within {made.tolerance:g})"
        return pick(en, f"{' 与 '.join(made.backends)} 在 {made.num_steps} 步内一致（损失差不超过 {made.tolerance:g}）")
    if made.parting is None:
        counts = " / ".join(str(len(own)) for own in made.steps)
        return pick(f"steps reported: {counts} of {made.num_steps}", f"报告的步数：{counts}，应为 {made.num_steps}")
    part = made.parting
    a, b = part.values
    return pick(
        f"they part at step {part.step}: {part.what} {a:.6g} / {b:.6g}", f"自第 {part.step} 步起不一致：{part.what} {a:.6g} / {b:.6g}"
    )


def as_json(made: Comparison) -> dict[str, Any]:
    """What compare.json holds."""
    return {"agree": made.agree, **made.model_dump(mode="json", exclude_none=True)}


def page(made: Comparison) -> str:
    """One HTML file that needs nothing else: verdict, curves, causes, every step."""

    def curves(name: str) -> list[Curve]:
        return [
            Curve(backend, [(float(s.step), getattr(s, name)) for s in own]) for backend, own in zip(made.backends, made.steps, strict=True)
        ]

    charts = svg_chart(pick("Loss", "损失"), curves("loss")) + svg_chart(pick("Gradient norm", "梯度范数"), curves("grad_norm"))
    checks = [(item.name, state_word(item), str(item.found)) for item in made.checks]
    title, language = escape(f"{made.recipe}: {' / '.join(made.backends)}"), "zh" if in_chinese() else "en"
    return (
        f'<!doctype html><html lang="{language}"><meta charset="utf-8"><title>{title}</title><style>{CSS}</style><main><h1>{title}</h1>'
        f'<p class="sub">{escape(verdict(made))}</p><div class="charts">{charts}</div>'
        f"<h2>{pick('Known causes', '已知原因')}</h2>{_html_table(checks)}"
        f"<h2>{pick('Steps', '各步')}</h2>{_html_table([head(made), *table_rows(made)])}</main></html>\n"
    )


def state_word(item: Check) -> str:
    """A check's state in the reader's language."""
    return pick(item.state, {"same": "相同", "differs": "不同", "unknown": "未知"}[item.state])


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="panel"><table>{body}</table></div>'

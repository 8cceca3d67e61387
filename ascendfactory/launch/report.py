"""The report of a run: one HTML file that needs nothing else, and the loss curve as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ascendfactory.core.messages import in_chinese, pick
from ascendfactory.core.plan import Plan
from ascendfactory.launch.chart import FULL_WIDTH, Line, number_text, smooth, svg_chart, write_png
from ascendfactory.launch.runs import Run, flatten, load_run, results_of
from ascendfactory.launch.style import CSS

_MIN_STEPS_TO_SMOOTH = 30


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` and `loss.png` into a run folder; returns the path of the HTML file.

    Args:
        run_dir: a run folder with plan.json and metrics.jsonl. Samples are shown where samples.json is there:
            a list of {prompt, before, after}.

    Raises:
        UserError: when the folder is not a run.
    """
    run = load_run(run_dir)
    if run.steps:
        write_png(run.dir / "loss.png", f"{run.plan.recipe.name}: loss", _loss_lines(run, english=True))
    path = run.dir / "report.html"
    path.write_text(_page(run), encoding="utf-8")
    return path


def _page(run: Run) -> str:
    recipe, plan = run.plan.recipe, run.plan
    count = f"{plan.cluster.num_devices} x {plan.cluster.device.title}"
    sub = " · ".join([plan.card.name, f"{recipe.objective.kind} / {recipe.tuning.kind}", count, plan.backend, plan.dtype])
    body = [
        f'<h1>{escape(recipe.name)}<span class="badge {run.state}">{_state(run.state)}</span></h1><p class="sub">{escape(sub)}</p>',
        _tiles(run),
        _charts(run),
        _samples(run.dir),
        f'<div class="two"><section>{_why(plan)}</section><section>{_memory(plan)}</section></div>',
        _data(run.dir),
        _settings(run),
        _provenance(run.dir),
    ]
    language = "zh" if in_chinese() else "en"
    return (
        f'<!doctype html><html lang="{language}"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(recipe.name)}</title><style>{CSS}</style><main>{''.join(body)}</main></html>\n"
    )


def _state(state: str) -> str:
    words = {"finished": "已完成", "stopped": "已停止", "failed": "失败", "running": "进行中", "planned": "未开始"}
    return pick(state, words.get(state, state))


def _tiles(run: Run) -> str:
    found = results_of(run)
    tiles: list[tuple[str, Any]] = [
        (pick("steps", "步数"), found["steps"]),
        (pick("last loss", "最终损失"), found["loss"]),
        (pick("evaluation loss", "评估损失"), found["eval_loss"]),
        (pick("tokens", "词元数"), number_text(found["tokens"]) if found["tokens"] else None),
        (pick("tokens/s", "词元/秒"), f"{found['tokens_per_s']:,}" if found["tokens_per_s"] else None),
        ("MFU", f"{run.last.mfu:.1%}" if run.last and run.last.mfu is not None else None),
        (pick("peak memory", "峰值内存"), f"{found['peak_memory_gib']} GiB" if found["peak_memory_gib"] else None),
        (pick("training time", "训练用时"), duration_text(found["time_s"]) if found["time_s"] else None),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(str(value))}</b><span>{escape(name)}</span></div>' for name, value in tiles if value is not None
        )
        + "</div>"
    )


def duration_text(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _loss_lines(run: Run, english: bool = False) -> list[Line]:
    """The loss (smoothed over its raw values where there are many) and the evaluation loss."""
    loss = [(float(s.step), s.loss) for s in run.steps]
    evaluated = [(float(s.step), s.eval_loss) for s in run.steps if s.eval_loss is not None]
    titles = ("training", "evaluation") if english else (pick("training", "训练"), pick("evaluation", "评估"))
    many = len(loss) >= _MIN_STEPS_TO_SMOOTH
    weight = max(0.5, min(0.95, 1 - _MIN_STEPS_TO_SMOOTH / max(1, len(loss))))  # an average over about a thirtieth of the run
    lines = [Line(titles[0], smooth(loss, weight) if many else loss)]
    if evaluated:
        lines.append(Line(titles[1], evaluated, "dots"))
    return lines + ([Line("", loss, "faint")] if many else [])


def _charts(run: Run) -> str:
    def over(name: str) -> list[tuple[float, float]]:
        return [(float(s.step), float(value)) for s in run.steps if (value := getattr(s, name)) is not None]

    loss = svg_chart(pick("Loss", "损失"), _loss_lines(run), width=FULL_WIDTH)
    small = [
        svg_chart(pick("Learning rate", "学习率"), [Line("lr", over("lr"))]),
        svg_chart(pick("Gradient norm", "梯度范数"), [Line("", over("grad_norm"))]),
        svg_chart(pick("Tokens per second", "每秒词元数"), [Line("", over("tokens_per_s"))], from_zero=True),
        svg_chart(pick("Memory, GiB", "内存（GiB）"), [Line("", [(x, y / 2**30) for x, y in over("memory_bytes")])], from_zero=True),
    ]
    return f'<div class="charts one">{loss}</div><div class="charts">{"".join(small)}</div>' if loss else ""


def _table(rows: Iterable[Sequence[Any]], head: Sequence[str] = (), css: str = "") -> str:
    top = "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>" if head else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="panel"><table class="{css}">{top}{body}</table></div>' if body else ""


def _titled(en: str, zh: str, body: str) -> str:
    return f"<h2>{escape(pick(en, zh))}</h2>{body}" if body else ""


def _samples(folder: Path) -> str:
    samples = _read(folder / "samples.json", [])
    rows = [(s.get("prompt", ""), s.get("before", ""), s.get("after", "")) for s in samples if isinstance(s, dict)]
    head = (pick("question", "问题"), pick("before training", "训练前"), pick("after training", "训练后"))
    return _titled("Answers before and after", "训练前后的回答", _table(rows, head, "wide"))


def _why(plan: Plan) -> str:
    reasons = "".join(f"<li>{escape(str(reason))}</li>" for reason in plan.why)
    return _titled("Why this plan", "为何如此计划", f'<div class="panel"><ul>{reasons}</ul></div>' if reasons else "")


def _memory(plan: Plan) -> str:
    rows = [(term.name, f"{term.num_bytes / 2**30:.2f}\u00a0GiB", term.formula) for term in plan.memory]
    total = (pick("total", "合计"), f"{plan.peak_bytes / 2**30:.2f}\u00a0GiB", f"/ {plan.cluster.device.memory_bytes / 2**30:.1f} GiB")
    return _titled("Predicted memory of a device", "单设备内存预测", _table([*rows, total]) if rows else "")


def _data(folder: Path) -> str:
    """The counts of the data path, from provenance.json; zeros say nothing and are left out."""
    counts = _read(folder / "provenance.json", {}).get("counts", {})
    rows = [(key.replace("_", " "), f"{v:,}" if isinstance(v, int) else v) for key, v in flatten(counts).items() if v] if counts else []
    return _titled("Data", "数据", _table(rows))


def _settings(run: Run) -> str:
    rows = list(flatten(run.plan.recipe.model_dump(mode="json")).items())
    layout = list(flatten(run.plan.layout.model_dump(), "plan.layout.").items())
    shown = [(key, "-" if value is None else value) for key, value in [*rows, *layout]]
    summary = pick(f"show all {len(shown)}", f"显示全部 {len(shown)} 项")
    return _titled("Settings", "设置", f"<details><summary>{summary}</summary>{_table(shown)}</details>")


def _provenance(folder: Path) -> str:
    facts = {key: value for key, value in _read(folder / "provenance.json", {}).items() if key != "counts"}
    command = _read(folder / "job" / "job.json", {}).get("argv", [])
    rows = [*flatten(facts).items()] if facts else []
    rows += [(pick("command", "命令"), " ".join(command))] if command else []
    return _titled("Provenance", "来源", _table((key, value) for key, value in rows if value not in ("", None)))


def _read(path: Path, default: Any) -> Any:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default
    return read if isinstance(read, type(default)) else default

"""The plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ascendfactory.core.messages import pick
from ascendfactory.core.plan import Layout, MemoryTerm, Plan
from ascendfactory.planner.advice import USABLE
from ascendfactory.planner.chinese import in_words
from ascendfactory.planner.memory import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

BAR_WIDTH = 28
MOST_STAGES = 16  # bars of stages printed


def render(plan: Plan) -> RenderableType:
    """Layout, memory by term and stage, the step's parts, alternatives, reasons and refusals."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(plan), Text(), _memory(plan)]
    if len(plan.stages) > 1:
        parts += [Text(), _stages(plan)]
    if plan.prediction:
        parts += [Text(), _step(plan), Text(pick("from ", "依据：") + str(plan.prediction.basis), style="dim")]
    if plan.placement:
        parts += [Text(), _placement(plan)]
    if plan.alternatives:
        parts += [Text(), _alternatives(plan)]
    parts += [Text(), Text(pick("why:", "原因：")), _points(str(reason) for reason in plan.why)]
    if plan.refused:
        words = (f"{refusal.where}{pick(': ', '：')}{pick(refusal.en, refusal.zh)}" for refusal in plan.refused)
        parts += [Text(), Text(pick("passed over:", "未选用：")), _points(words)]
    return Group(*parts)


def layout_words(layout: Layout) -> str:
    """A layout in one line: what is not 1 or off."""
    words = [f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "vpp", "ring", "ulysses", "ep") if getattr(layout, name) > 1]
    words.append(f"zero {layout.zero}")
    words += [f"replicate {layout.replicate}"] if layout.replicate > 1 else []
    words += ["sp"] if layout.sp else []
    words += [layout.schedule] if layout.pp > 1 else []
    part = pick(f" ({layout.recompute_layers} layers)", f"（{layout.recompute_layers} 层）") if layout.recompute_layers else ""
    words.append(f"recompute {layout.recompute}{part}")
    flags = ("recompute_in_advance", "offload_activations", "offload_optimizer", "reuse_params")
    words += [name for name in flags if getattr(layout, name)]
    words += ["optim_dtype bfloat16"] if layout.optim_dtype == "bfloat16" else []
    return ", ".join(words)


def _head(plan: Plan) -> Text:
    from rich.text import Text

    layout, cluster, micro = plan.layout, plan.cluster, plan.layout.num_micro
    return Text.assemble(
        (plan.recipe.name, "bold"),
        f"  {plan.card.name} · {plan.recipe.objective.kind} · {plan.recipe.tuning.kind} · {plan.dtype} · {plan.backend}\n",
        f"{cluster.nodes} x {cluster.nproc} {cluster.device.name}: {layout_words(layout)}\n",
        pick(
            f"{micro} micro-batch{'es' if micro > 1 else ''} of {layout.micro_size} x {plan.recipe.data.seq_len} tokens",
            f"{micro} 个微批，每个 {layout.micro_size} x {plan.recipe.data.seq_len} token",
        ),
    )


def _memory(plan: Plan) -> Table:
    from rich.text import Text

    room = plan.cluster.device.memory_bytes * USABLE
    title = pick("memory of the fullest device", "最满设备的内存") if len(plan.stages) > 1 else pick("memory of a device", "单设备内存")
    table = _table(title, "GiB", "", pick("formula", "公式"))
    for term in sorted(plan.memory, key=lambda t: -t.num_bytes):
        bar = _bar(term.num_bytes, max(room, plan.peak_bytes))
        table.add_row(
            in_words(term.name),
            f"{term.num_bytes / GIB:.2f}",
            bar,
            Text(in_words(term.formula), style="dim"),
        )
    free = pick(f"of {room / GIB:.1f} usable", f"可用 {room / GIB:.1f}")
    table.add_row(Text(pick("total", "合计"), style="bold"), f"{plan.peak_bytes / GIB:.2f}", free, "")
    return table


def _stages(plan: Plan) -> Table:
    """A bar for each pipeline stage, states and activations in two shades."""
    from rich.text import Text

    room = plan.cluster.device.memory_bytes * USABLE
    table = _table(pick("stage", "级"), "GiB", pick("states ▓, activations ░, rest ▒", "状态 ▓、激活 ░、其余 ▒"))
    for number, terms in enumerate(plan.stages[:MOST_STAGES]):
        total = sum(term.num_bytes for term in terms)
        states = _sum(terms, ("weights", "masters", "gradients", "moments", "gathered weights", "reference", "critic"))
        active = _sum(terms, ("activations", "vision", "logits"))
        width = [round(BAR_WIDTH * part / max(room, total)) for part in (states, active, total - states - active)]
        table.add_row(str(number), f"{total / GIB:.1f}", Text("▓" * width[0] + "░" * width[1] + "▒" * width[2], style="cyan"))
    if rest := [sum(term.num_bytes for term in terms) for terms in plan.stages[MOST_STAGES:]]:
        words = pick(f"at most, of the {len(rest)} others", f"其余 {len(rest)} 级中最多者")
        table.add_row("…", f"{max(rest) / GIB:.1f}", Text(words, style="dim"))
    return table


def _step(plan: Plan) -> Table:
    from rich.text import Text

    prediction = plan.prediction
    assert prediction is not None
    table = _table(pick("predicted step", "预测单步时间"), pick("s", "秒"), "", pick("what", "内容"))
    for part in sorted(prediction.parts, key=lambda p: -p.seconds):
        bar = _bar(part.seconds, prediction.step_s)
        detail = Text(in_words(part.detail), style="dim")
        table.add_row(in_words(part.name), f"{part.seconds:.3f}", bar, detail)
    speed = f"{prediction.tokens_per_s_device:.0f} tokens/s"
    speed = pick(f"{speed} a device", f"每设备 {speed}")
    table.add_row(
        Text(pick("total", "合计"), style="bold"), f"{prediction.step_s:.3f}", speed, f"MFU {prediction.mfu:.0%}, ±{prediction.band:.0%}"
    )
    return table


def _placement(plan: Plan) -> Text:
    from rich.text import Text

    place = plan.placement
    assert place is not None
    where = pick("on the training devices", "与训练共用设备") if place.colocated else pick("on devices of its own", "使用独立设备")
    return Text(
        pick(
            f"rollout {where}: {place.rollout_devices} devices, tp {place.rollout_tp}, {place.kv_share:.0%} of memory "
            f"for {place.kv_tokens} cached tokens; generation {place.rollout_s:.1f} s, step {place.step_s:.1f} s (not calibrated)",
            f"推理引擎{where}：{place.rollout_devices} 个设备，tp {place.rollout_tp}，{place.kv_share:.0%} 内存"
            f"用于 {place.kv_tokens} 个缓存 token；生成 {place.rollout_s:.1f} 秒，单步 {place.step_s:.1f} 秒（未校准）",
        )
    )


def _alternatives(plan: Plan) -> Table:
    table = _table(pick("next best", "次优方案"), pick("step s", "单步秒"), "GiB", pick("micro", "微批"), pick("layout", "布局"))
    table.padding = (0, 1, 0, 0)  # a long layout keeps to its line
    base = plan.prediction.step_s if plan.prediction else 0.0
    for choice in plan.alternatives:
        slower = f"{100 * (choice.step_s / base - 1):+.1f} %" if base else ""
        micro = f"{choice.layout.num_micro} x {choice.layout.micro_size}"
        figures = (f"{choice.step_s:.3f}", f"{choice.peak_bytes / GIB:.1f}", micro)
        table.add_row(f"{slower} {choice.backend}", *figures, layout_words(choice.layout))
    return table


def _points(lines: Iterable[str]) -> Table:
    """Lines after bullets, their continuations indented."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        table.add_row("·", Text(line))
    return table


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i == 1 else "left", overflow="fold")
    return table


def _bar(part: float, whole: float) -> Text:
    from rich.text import Text

    return Text("█" * max(1, round(BAR_WIDTH * part / whole)), style="cyan")


def _sum(terms: Iterable[MemoryTerm], names: tuple[str, ...]) -> int:
    return sum(term.num_bytes for term in terms if term.name in names)

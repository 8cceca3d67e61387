"""The plan as a person reads it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ascendfactory.core.messages import pick
from ascendfactory.core.plan import Layout, MemoryTerm, Plan, Refusal
from ascendfactory.planner.advice import USABLE
from ascendfactory.planner.memory import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

BAR_WIDTH = 28
MOST_STAGES = 16  # bars of stages printed
_TERMS_ZH = {
    **{"weights": "权重", "masters": "主权重", "gradients": "梯度", "moments": "优化器动量", "gathered weights": "聚合中的权重"},
    **{"activations": "激活", "vision": "视觉激活", "logits": "logits", "reference": "参考模型", "critic": "价值模型"},
    **{"buffers": "缓冲区", "checkpoint copy": "检查点副本", "runtime": "运行时"},
}
_PARTS_ZH = {
    **{"matrix products": "矩阵乘", "experts": "专家矩阵乘", "routing": "专家路由", "attention": "注意力", "head": "输出层"},
    **{"memory bound": "访存", "tp": "tp 通信", "ulysses": "ulysses 通信", "ring": "ring 通信", "ep": "ep 通信", "pp": "pp 通信"},
    **{"dp": "dp 通信", "bubble": "流水线气泡", "optimizer": "优化器", "host": "主机内存传输"},
}


def render(plan: Plan) -> RenderableType:
    """Layout, memory by term and stage, the step's parts, alternatives, reasons and refusals."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_head(plan), Text(), _memory(plan)]
    if len(plan.stages) > 1:
        parts += [Text(), _stages(plan)]
    if plan.prediction:
        parts += [Text(), _step(plan)]
    if plan.placement:
        parts += [Text(), _placement(plan)]
    if plan.alternatives:
        parts += [Text(), _alternatives(plan)]
    parts += [Text(), *(Text(f"· {reason}") for reason in plan.why)]
    if plan.refused:
        parts += [Text(), Text(pick("passed over:", "未选用：")), *_refused(plan.refused)]
    return Group(*parts)


def layout_words(layout: Layout) -> str:
    """A layout in one line: what is not 1 or off."""
    words = [f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "vpp", "ring", "ulysses", "ep") if getattr(layout, name) > 1]
    words.append(f"zero {layout.zero}")
    words += [f"replicate {layout.replicate}"] if layout.replicate > 1 else []
    words += ["sp"] if layout.sp else []
    words += [layout.schedule] if layout.pp > 1 else []
    part = f" ({layout.recompute_layers} layers)" if layout.recompute_layers else ""
    words.append(f"recompute {layout.recompute}{part}")
    flags = ("offload_activations", "offload_optimizer", "reuse_params")
    words += [name for name in flags if getattr(layout, name)]
    words += ["bf16 moments"] if layout.optim_dtype == "bfloat16" else []
    return ", ".join(words)


def _head(plan: Plan) -> Text:
    from rich.text import Text

    layout, cluster = plan.layout, plan.cluster
    return Text.assemble(
        (plan.recipe.name, "bold"),
        f"  {plan.card.name} · {plan.recipe.objective.kind} · {plan.recipe.tuning.kind} · {plan.dtype} · {plan.backend}\n",
        f"{cluster.nodes} x {cluster.nproc} {cluster.device.name}: {layout_words(layout)}, ",
        f"{layout.micro_size} x {plan.recipe.data.seq_len} tokens, {layout.num_micro} micro-batches",
    )


def _memory(plan: Plan) -> Table:
    from rich.text import Text

    room = plan.cluster.device.memory_bytes * USABLE
    title = pick("memory of the fullest device", "最满设备的内存") if len(plan.stages) > 1 else pick("memory of a device", "单设备内存")
    table = _table(title, "GiB", "", pick("formula", "公式"))
    for term in sorted(plan.memory, key=lambda t: -t.num_bytes):
        bar = _bar(term.num_bytes, max(room, plan.peak_bytes))
        table.add_row(
            pick(term.name, _TERMS_ZH.get(term.name, term.name)), f"{term.num_bytes / GIB:.2f}", bar, Text(term.formula, style="dim")
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
    return table


def _step(plan: Plan) -> Table:
    from rich.text import Text

    prediction = plan.prediction
    assert prediction is not None
    table = _table(pick("predicted step", "预测单步时间"), pick("s", "秒"), "", "")
    for part in sorted(prediction.parts, key=lambda p: -p.seconds):
        bar = _bar(part.seconds, prediction.step_s)
        table.add_row(pick(part.name, _PARTS_ZH.get(part.name, part.name)), f"{part.seconds:.3f}", bar, Text(part.detail, style="dim"))
    speed = pick(
        f"{prediction.tokens_per_s_device:.0f} tokens/s a device, MFU {prediction.mfu:.0%}, ±{prediction.band:.0%}",
        f"每设备 {prediction.tokens_per_s_device:.0f} tokens/s，MFU {prediction.mfu:.0%}，误差 ±{prediction.band:.0%}",
    )
    table.add_row(Text(pick("total", "合计"), style="bold"), f"{prediction.step_s:.3f}", speed, "")
    table.add_row("", "", Text(pick("from ", "依据：") + prediction.basis, style="dim", overflow="fold"), "")
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
    table = _table(pick("next best", "次优方案"), pick("step s", "单步秒"), "GiB", pick("layout", "布局"))
    base = plan.prediction.step_s if plan.prediction else 0.0
    for choice in plan.alternatives:
        slower = f"{100 * (choice.step_s / base - 1):+.1f} %" if base else ""
        words = f"{layout_words(choice.layout)}, {choice.layout.micro_size} x {choice.layout.num_micro}"
        table.add_row(f"{slower} {choice.backend}", f"{choice.step_s:.3f}", f"{choice.peak_bytes / GIB:.1f}", words)
    return table


def _refused(refused: Iterable[Refusal]) -> list[Text]:
    from rich.text import Text

    return [Text(f"· {refusal.where}: {pick(refusal.en, refusal.zh)}") for refusal in refused]


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, title in enumerate(titles):
        table.add_column(title, justify="right" if i in (1,) else "left", overflow="fold")
    return table


def _bar(part: float, whole: float) -> Text:
    from rich.text import Text

    return Text("█" * max(1, round(BAR_WIDTH * part / whole)), style="cyan")


def _sum(terms: Iterable[MemoryTerm], names: tuple[str, ...]) -> int:
    return sum(term.num_bytes for term in terms if term.name in names)

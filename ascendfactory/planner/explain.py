"""The plan as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascendfactory.core.messages import pick
from ascendfactory.core.plan import Plan
from ascendfactory.planner.memory import GIB
from ascendfactory.planner.search import USABLE

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_WIDTH = 28


def render(plan: Plan) -> RenderableType:
    """Layout, a memory bar for each term, and the reasons."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    layout, device = plan.layout, plan.cluster.device
    head = Text.assemble(
        (plan.recipe.name, "bold"),
        f"  {plan.card.name} · {plan.recipe.objective.kind} · {plan.recipe.tuning.kind} · {plan.dtype} · {plan.backend}\n",
        f"{plan.cluster.nodes} x {plan.cluster.nproc} {device.name}: ",
        f"dp {layout.dp} (zero {layout.zero}, replicate {layout.replicate}), recompute {layout.recompute}, "
        f"{layout.micro_size} x {plan.recipe.data.seq_len} tokens, {layout.num_micro} micro-batches",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column(pick("memory of a device", "单设备内存"))
    table.add_column("GiB", justify="right")
    table.add_column("")
    table.add_column(pick("formula", "公式"), style="dim")
    room = device.memory_bytes * USABLE
    for term in sorted(plan.memory, key=lambda t: -t.num_bytes):
        bar = "█" * max(1, round(BAR_WIDTH * term.num_bytes / max(room, plan.peak_bytes)))
        table.add_row(term.name, f"{term.num_bytes / GIB:.2f}", Text(bar, style="cyan"), term.formula)
    free = pick(f"of {room / GIB:.1f} usable", f"可用 {room / GIB:.1f}")
    table.add_row(Text(pick("total", "合计"), style="bold"), f"{plan.peak_bytes / GIB:.2f}", free, "")
    return Group(head, Text(), table, Text(), *(Text(f"· {reason}") for reason in plan.why))

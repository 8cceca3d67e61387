"""What makes a layout illegal: one row a rule, each with its text and its fix."""

from __future__ import annotations

from ascendfactory.core.plan import Cluster, Layout, ModelCard, Refusal
from ascendfactory.core.recipe import Recipe


def illegal(recipe: Recipe, card: ModelCard, cluster: Cluster, layout: Layout) -> list[Refusal]:
    """Every rule that a layout breaks."""
    return [refusal for rule in RULES if (refusal := rule(recipe, card, cluster, layout))]


def _devices(recipe: Recipe, card: ModelCard, cluster: Cluster, layout: Layout) -> Refusal | None:
    used = layout.dp * layout.tp * layout.pp * layout.ring * layout.ulysses
    if used == cluster.num_devices:
        return None
    return Refusal(
        code="devices",
        where="layout.dp",
        en=f"the degrees multiply to {used}, the cluster has {cluster.num_devices} devices; write dp: auto",
        zh=f"各并行度之积为 {used}，而集群有 {cluster.num_devices} 个设备；请写 dp: auto",
        fix={"layout.dp": "auto"},
    )


def _replicate(recipe: Recipe, card: ModelCard, cluster: Cluster, layout: Layout) -> Refusal | None:
    if layout.dp % layout.replicate == 0:
        return None
    return Refusal(
        code="replicate",
        where="layout.replicate",
        en=f"replicate {layout.replicate} does not divide dp {layout.dp}; write replicate: 1",
        zh=f"replicate {layout.replicate} 不能整除 dp {layout.dp}；请写 replicate: 1",
        fix={"layout.replicate": 1},
    )


def _global_batch(recipe: Recipe, card: ModelCard, cluster: Cluster, layout: Layout) -> Refusal | None:
    rows, unit = recipe.batch.global_size, layout.dp * layout.micro_size
    if rows == unit * layout.num_micro:
        return None
    unit = layout.dp if recipe.batch.micro_size == "auto" else unit
    better = max(unit, round(rows / unit) * unit)
    return Refusal(
        code="global_batch",
        where="batch.global_size",
        en=f"{rows} rows cannot be shared by dp {layout.dp} in micro-batches of {layout.micro_size}; nearest: {better}",
        zh=f"{rows} 行无法按 dp {layout.dp}、微批 {layout.micro_size} 均分；最接近的是 {better}",
        fix={"batch.global_size": better},
    )


def _seq_len(recipe: Recipe, card: ModelCard, cluster: Cluster, layout: Layout) -> Refusal | None:
    if recipe.data.seq_len <= card.max_seq_len:
        return None
    return Refusal(
        code="seq_len",
        where="data.seq_len",
        en=f"{recipe.data.seq_len} is beyond the {card.max_seq_len} positions that {card.name} knows; write {card.max_seq_len} or less",
        zh=f"{recipe.data.seq_len} 超出 {card.name} 支持的 {card.max_seq_len} 个位置；请写 {card.max_seq_len} 或更小",
        fix={"data.seq_len": card.max_seq_len},
    )


RULES = (_devices, _replicate, _global_batch, _seq_len)

"""Which pipeline device runs which layers: one rule for the planner that prices a layout and the engine that runs it.

A chunk is a run of consecutive layers; each of the pp devices of a pipeline owns vpp of them. Chunk 0 begins with the embedding, the last
one ends with the head and the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from ascendfactory.core.plan import Layout, ModelCard
from ascendfactory.core.recipe import Schedule

V_SHAPED: frozenset[Schedule] = frozenset({"zbv", "dualpipev"})  # a device owns a chunk on the way down and its mirror on the way up
SPLIT_BACKWARD: frozenset[Schedule] = frozenset({"zero_bubble", "zbv", "dualpipev"})  # weight gradients wait for an idle moment


@dataclass(frozen=True)
class StageCosts:
    """Time of the parts of a model in any one unit."""

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0  # last norm, head and loss


def model_costs(card: ModelCard, seq_len: int) -> StageCosts:
    """Forward operations a token: 2 per weight, and the causal attention of a whole row; backward is in proportion.

    The embedding multiplies nothing: it counts as one read and one write of a hidden state.
    """
    tables = (1 if card.tied_embeddings else 2) * card.vocab_size * card.hidden_size
    weights = max(0, card.num_active_params - tables) / max(1, card.num_layers)
    attention = 2.0 * seq_len * card.num_heads * card.head_dim
    layer = 2.0 * weights + attention
    return StageCosts((layer,) * card.num_layers, 2.0 * card.hidden_size, 2.0 * card.vocab_size * card.hidden_size)


def owner(chunk: int, pp: int, vpp: int, schedule: Schedule) -> int:
    """The pipeline rank that runs a chunk: in turn, or down and up again for the V-shaped schedules.

    >>> [owner(chunk, 2, 2, "interleaved") for chunk in range(4)], [owner(chunk, 2, 2, "zbv") for chunk in range(4)]
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    if schedule in V_SHAPED:
        return chunk if chunk < pp else pp * vpp - 1 - chunk
    return chunk % pp


def chunks_of(rank: int, pp: int, vpp: int, schedule: Schedule) -> list[int]:
    """The chunks of a pipeline rank, in the model's order."""
    return [chunk for chunk in range(pp * vpp) if owner(chunk, pp, vpp, schedule) == rank]


def cut(pp: int, vpp: int, costs: StageCosts, stage_layers: Sequence[int] = ()) -> list[range]:
    """The layers of each chunk, in the model's order.

    Without `stage_layers` the dearest chunk is as cheap as it can be (a pipeline goes at its pace), and among such cuts the sum of
    squared costs is least. By dynamic programming in pp·vpp·(layers)² steps.

    Args:
        stage_layers: layers of each chunk as the person wants them; 0 makes a chunk that only passes activations on.

    Raises:
        ValueError: `stage_layers` does not name pp·vpp counts that add up to the model's layers.
    """
    num_layers, num_chunks = len(costs.layers), pp * vpp
    if stage_layers:
        if len(stage_layers) != num_chunks or sum(stage_layers) != num_layers or min(stage_layers) < 0:
            raise ValueError(f"{num_chunks} counts that add up to {num_layers} are wanted, not {list(stage_layers)}")
        bounds = [sum(stage_layers[:chunk]) for chunk in range(num_chunks + 1)]
    else:
        bounds = _cheapest_bounds(num_chunks, costs)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def layout_cut(layout: Layout, costs: StageCosts) -> list[range]:
    """The cut of a layout: by its `stage_layers`, else by cost."""
    return cut(layout.pp, layout.vpp, costs, layout.stage_layers)


def _cheapest_bounds(num_chunks: int, costs: StageCosts) -> list[int]:
    ends = [0.0]
    for layer in costs.layers:
        ends.append(ends[-1] + layer)

    def cost(chunk: int, start: int, stop: int) -> float:
        edge = (costs.embedding if chunk == 0 else 0.0) + (costs.head if chunk == num_chunks - 1 else 0.0)
        return ends[stop] - ends[start] + edge

    num_layers = len(costs.layers)
    dearest = [cost(0, 0, stop) for stop in range(num_layers + 1)]
    for chunk in range(1, num_chunks):
        dearest = [min(max(dearest[at], cost(chunk, at, stop)) for at in range(stop + 1)) for stop in range(num_layers + 1)]
    limit = dearest[num_layers] * (1 + 1e-12)
    # second pass: the most even of the cuts that keep to the limit
    squares = [cost(0, 0, stop) ** 2 if cost(0, 0, stop) <= limit else inf for stop in range(num_layers + 1)]
    came_from: list[list[int]] = []
    for chunk in range(1, num_chunks):
        best = [(inf, 0)] * (num_layers + 1)
        for stop in range(num_layers + 1):
            within = [at for at in range(stop + 1) if cost(chunk, at, stop) <= limit]
            best[stop] = min(((squares[at] + cost(chunk, at, stop) ** 2, at) for at in within), default=(inf, 0))
        squares = [value for value, _ in best]
        came_from.append([at for _, at in best])
    bounds = [num_layers]
    for places in reversed(came_from):
        bounds.append(places[bounds[-1]])
    return [0, *reversed(bounds)]


def schedule_problem(schedule: Schedule, pp: int, vpp: int, num_micro: int) -> tuple[str, str] | None:
    """Why a schedule cannot order this many micro-batches over these chunks, and what to do: (English, Chinese); None if it can."""
    if schedule in ("gpipe", "1f1b") and vpp != 1:
        return (
            f"{schedule} runs one chunk a stage, not {vpp}; use interleaved or zero_bubble, or layout.vpp: 1",
            f"{schedule} 每个流水级只运行 1 个分块，而不是 {vpp} 个；请改用 interleaved 或 zero_bubble，或设 layout.vpp: 1",
        )
    if schedule == "interleaved" and vpp == 1:
        return ("interleaved needs layout.vpp of at least 2; use 1f1b", "interleaved 要求 layout.vpp 至少为 2；请改用 1f1b")
    if schedule in V_SHAPED and vpp != 2:
        return (
            f"{schedule} runs two chunks a stage, not {vpp}; set layout.vpp: 2",
            f"{schedule} 每个流水级运行 2 个分块，而不是 {vpp} 个；请设 layout.vpp: 2",
        )
    if schedule in ("interleaved", "zero_bubble") and num_micro % max(1, num_micro // pp):
        nearest = num_micro // pp * pp
        return (
            f"{schedule} cannot order {num_micro} micro-batches over {pp} stages; the nearest count is {nearest}: change batch.global_size",
            f"{schedule} 无法把 {num_micro} 个微批次安排到 {pp} 个流水级；最接近的数量是 {nearest}：请调整 batch.global_size",
        )
    if schedule == "dualpipev" and num_micro < pp * vpp:
        return (
            f"dualpipev needs at least {pp * vpp} micro-batches a step, not {num_micro}; use a smaller batch.micro_size, or zbv",
            f"dualpipev 每步至少需要 {pp * vpp} 个微批次，现为 {num_micro}；请减小 batch.micro_size，或改用 zbv",
        )
    return None

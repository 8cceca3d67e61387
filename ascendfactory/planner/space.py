"""The layouts worth weighing: every combination of the degrees that the recipe leaves open and a back end accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from ascendfactory.core.plan import Cluster, Layout, ModelCard, Refusal
from ascendfactory.core.recipe import LayoutSpec, Recipe, Recompute
from ascendfactory.core.stages import V_SHAPED
from ascendfactory.planner.grid import RECOMPUTES, SCHEDULES, Grid, Ints, as_tuples, joined

ENOUGH_TOKENS = {"cpu": 2048, "cuda": 16384, "npu": 16384}  # of a micro-batch; more no longer makes the GEMMs faster
LONG_ROW_TOKENS = 8192  # rows are cut by context parallelism down to this, not below
MOST_STAGES, MOST_CHUNKS, MOST_TP = 64, 8, 16
ZEROS: tuple[Literal[1, 2, 3], ...] = (3, 2, 1)  # in order of what they save
DEGREES = ("tp", "pp", "vpp", "ring", "ulysses", "ep")

Judge = Callable[[Layout], list[Refusal]]  # what a back end says to a layout


@dataclass(frozen=True)
class Freedom:
    """What a back end can vary."""

    degrees: frozenset[str]
    sp: bool  # whether tp goes with sequence parallelism
    zeros: tuple[int, ...]
    recomputes: tuple[Recompute, ...]
    recompute_layers: bool
    gpipe: bool


def freedom(judge: Judge, cluster: Cluster) -> Freedom:
    """Asks a back end about one layout a feature: what it refuses beyond its refusals of plain data parallelism is closed."""
    plain = min((Layout(dp=cluster.num_devices, zero=zero) for zero in ZEROS), key=lambda layout: len(judge(layout)))
    known = {refusal.code for refusal in judge(plain)}

    def accepts(**change: object) -> bool:
        return all(refusal.code in known for refusal in judge(plain.model_copy(update=change)))

    sp = accepts(tp=2, sp=True)
    return Freedom(
        frozenset(name for name in DEGREES if accepts(**{name: 2}) or (name == "tp" and sp)),
        sp,
        tuple(zero for zero in ZEROS if accepts(zero=zero)) or (3,),
        tuple(mode for mode in RECOMPUTES if accepts(recompute=mode)) or ("none",),
        accepts(recompute="full", recompute_layers=1),
        accepts(pp=2, schedule="gpipe"),
    )


def space(recipe: Recipe, card: ModelCard, cluster: Cluster, free: Freedom) -> Grid:
    """Candidates, the legal ones and a few others among them; never empty."""
    spec, num = recipe.layout, cluster.num_devices
    rows: list[tuple[int, ...]] = []
    for tp, pp, ring, ulysses in product(*(_degrees(spec, name, card, cluster, recipe, free) for name in ("tp", "pp", "ring", "ulysses"))):
        model_devices = tp * pp * ring * ulysses
        if spec.dp == "auto" and num % model_devices:
            continue
        dp = max(1, num // model_devices) if spec.dp == "auto" else spec.dp
        for vpp in _chunks(spec, pp, card, free):
            for ep in _degrees(spec, "ep", card, cluster, recipe, free):
                if ep > 1 and spec.ep == "auto" and (dp * ring * ulysses * tp) % ep:
                    continue
                rows.append((dp, tp, pp, ring, ulysses, vpp, ep))
    if not rows:
        rows = [_plain(spec, num)]
    return _with_choices(recipe, card, cluster, free, np.array(rows, np.int64))


def _plain(spec: LayoutSpec, num: int) -> tuple[int, ...]:
    """The pinned degrees, 1 where open: what the rules can name the fault of."""
    tp, pp, ring, ulysses, vpp, ep = (
        1 if getattr(spec, name) == "auto" else getattr(spec, name) for name in ("tp", "pp", "ring", "ulysses", "vpp", "ep")
    )
    dp = max(1, num // (tp * pp * ring * ulysses)) if spec.dp == "auto" else spec.dp
    return (dp, tp, pp, ring, ulysses, vpp, ep)


def _degrees(spec: LayoutSpec, name: str, card: ModelCard, cluster: Cluster, recipe: Recipe, free: Freedom) -> Iterable[int]:
    pinned = getattr(spec, name)
    if pinned != "auto":
        return (int(pinned),)
    if name not in free.degrees:
        return (1,)
    if name == "tp":
        return [d for d in _divisors(cluster.nproc, MOST_TP) if card.num_heads % d == 0]
    if name == "pp":
        return _divisors(cluster.num_devices, min(MOST_STAGES, card.num_layers))
    if name == "ep":
        return _divisors(card.moe.num_experts, cluster.num_devices) if card.moe else (1,)
    most = max(1, recipe.data.seq_len // LONG_ROW_TOKENS)
    return [d for d in (1, 2, 4, 8, 16, 32) if d <= most and cluster.num_devices % d == 0]


def _chunks(spec: LayoutSpec, pp: int, card: ModelCard, free: Freedom) -> Iterable[int]:
    if spec.vpp != "auto":
        return (spec.vpp,)
    if pp == 1 or "vpp" not in free.degrees or spec.schedule in ("gpipe", "1f1b"):
        return (1,)
    if spec.stage_layers != "auto":  # one number a chunk
        return (max(1, len(spec.stage_layers) // pp),)
    if spec.schedule in V_SHAPED:
        return (2,)
    return [v for v in (1, 2, 3, 4, MOST_CHUNKS) if pp * v <= card.num_layers]


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def _with_choices(recipe: Recipe, card: ModelCard, cluster: Cluster, free: Freedom, degrees: Ints) -> Grid:
    """Each set of degrees with each micro-batch, ZeRO level and way of recomputing."""
    spec = recipe.layout
    zeros = free.zeros if spec.zero == "auto" else (spec.zero,)
    modes = free.recomputes if spec.recompute == "auto" else (spec.recompute,)
    parts = []
    for dp in sorted(set(degrees[:, 0].tolist())):
        of_dp = degrees[degrees[:, 0] == dp]
        rows = max(1, recipe.rows_a_step // dp)
        for micro, mode in product(micro_sizes(recipe, rows, cluster), modes):
            for zero in zeros:
                num_micro = max(1, rows // micro)
                parts += [_grid(spec, of_dp, card, micro, num_micro, mode, zero, share, free) for share in _shares(spec, mode, free)]
    return joined(parts)


def _shares(spec: LayoutSpec, mode: Recompute, free: Freedom) -> tuple[float, ...]:
    """Parts of a stage's layers that are recomputed."""
    partial = free.recompute_layers and spec.recompute_layers == "auto" and mode == "full"
    return (1.0, 0.5, 0.25) if partial else (1.0,)


def micro_sizes(recipe: Recipe, rows: int, cluster: Cluster) -> list[int]:
    """Divisors of a device's rows, from the largest that is worth it down to 1."""
    if recipe.batch.micro_size != "auto":
        return [recipe.batch.micro_size]
    most = max(1, ENOUGH_TOKENS[cluster.device.kind] // recipe.data.seq_len)
    return [m for m in range(min(most, rows), 0, -1) if rows % m == 0]


def _grid(
    spec: LayoutSpec, degrees: Ints, card: ModelCard, micro: int, num_micro: int, mode: Recompute, zero: int, share: float, free: Freedom
) -> Grid:
    dp, tp, pp, ring, ulysses, vpp, ep = degrees.T
    ones = np.ones(len(dp), np.int64)
    if spec.recompute_layers not in ("auto", "all"):
        layers = ones * int(spec.recompute_layers) if mode != "none" else 0 * ones
    else:
        layers = np.maximum(1, (card.num_layers // pp * share).astype(np.int64)) if share < 1 else 0 * ones
    if spec.schedule == "auto":
        # with fewer micro-batches than stages both keep them all; torch's 1F1B refuses to
        plain = np.where(free.gpipe & (num_micro < pp), SCHEDULES.index("gpipe"), SCHEDULES.index("1f1b"))
        schedule = np.where(vpp > 1, SCHEDULES.index("interleaved"), plain)
    else:
        schedule = ones * SCHEDULES.index(spec.schedule)
    sizes = () if spec.stage_layers == "auto" else tuple(spec.stage_layers)
    return Grid(
        dp=dp, replicate=ones * spec.replicate, zero=ones * zero, tp=tp,
        sp=((tp > 1) & free.sp).astype(np.int64) if spec.sp == "auto" else ones * int(spec.sp),
        pp=pp, vpp=vpp, schedule=schedule, stage_layers=as_tuples([sizes] * len(dp)),
        overlap_chunks=ones * spec.overlap_chunks, ring=ring, ulysses=ulysses, ep=ep,
        recompute=ones * RECOMPUTES.index(mode), recompute_layers=layers, recompute_in_advance=ones * int(spec.recompute_in_advance),
        offload_activations=ones * int(spec.offload_activations), offload_optimizer=ones * int(spec.offload_optimizer),
        optim_dtype=ones * (spec.optim_dtype == "bfloat16"), reuse_params=ones * int(spec.reuse_params),
        micro_size=ones * micro, num_micro=ones * num_micro,
    )  # fmt: skip

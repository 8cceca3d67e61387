"""From a recipe to a plan: every legal layout that fits, ranked by predicted time, on each back end that accepts the recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from ascendfactory.core.measured import Measurement, measured_path, read_measurements
from ascendfactory.core.plan import Choice, Cluster, Layout, ModelCard, NoPlan, Placement, Plan, Refusal
from ascendfactory.core.recipe import PolicyGradient, Recipe
from ascendfactory.planner.advice import USABLE, reasons, room_bytes, too_big
from ascendfactory.planner.calibrate import Factor, factor_of
from ascendfactory.planner.engines import engine_of
from ascendfactory.planner.grid import Floats, Grid, Ints
from ascendfactory.planner.memory import Setting, peak_bytes, stage_terms
from ascendfactory.planner.placement import place, training_parts
from ascendfactory.planner.rules import illegal, legal
from ascendfactory.planner.space import ENOUGH_TOKENS, freedom, space
from ascendfactory.planner.time import modelled_seconds, predict, step_seconds

__all__ = ["ENOUGH_TOKENS", "USABLE", "Ranked", "choose_dtype", "make_plan", "rank"]

NUM_ALTERNATIVES = 5
NUM_ASKED = 200  # layouts that a back end is asked about, the fastest first
SAME_SPEED = 0.002  # relative differences of predicted time below this are none


class Judge(Protocol):
    """The part of a back end that planning needs."""

    def refuse(self, recipe: Recipe, card: ModelCard, layout: Layout) -> list[Refusal]:
        """Why the recipe cannot run under this layout; empty if it can."""


@dataclass(frozen=True)
class Ranked:
    """The legal, fitting layouts of one back end, the fastest first; and all that were weighed."""

    backend: str
    setting: Setting
    factor: Factor
    grid: Grid
    peaks: Ints
    seconds: Floats
    num_weighed: int
    leanest: Layout | None  # of the legal ones, or of all where none is legal


def make_plan(
    recipe: Recipe, card: ModelCard, cluster: Cluster, backends: Mapping[str, Judge], run_dir: str, num_alternatives: int = NUM_ALTERNATIVES
) -> Plan:
    """The layout with the shortest predicted step, of those that are legal, fit and are accepted by a back end.

    Args:
        cluster: the devices at hand; `memory_bytes` is what a device has free.
        backends: name → back end; all are weighed if the recipe says `auto`, else the one that it names, which must be there.
        num_alternatives: how many of the next best the plan tells.

    Raises:
        NoPlan: with every reason and what would mend it.
    """
    names = list(backends) if recipe.backend == "auto" else [recipe.backend]
    parts = training_parts(recipe, cluster)
    if not parts:
        raise NoPlan([_one_device()])
    found: list[tuple[Ranked, list[int]]] = []
    refusals: list[Refusal] = []
    own_runs = read_measurements(measured_path(run_dir))
    for name in names:
        said: list[Refusal] = []
        for part in parts:
            ranked = rank(recipe, card, part, name, backends[name], own_runs)
            if accepted := _accepted(ranked, backends[name], num_alternatives + 1):
                found.append((ranked, accepted))
            else:
                said += _why_not(recipe, card, part, ranked, backends[name])
        refusals += [] if found and found[-1][0].backend == name else said
    if not found:
        raise NoPlan(_once(refusals))
    found.sort(key=lambda pair: _whole_step_s(pair[0], pair[1], cluster))
    return _plan(recipe, card, cluster, run_dir, found, _once(refusals), num_alternatives)


def rank(recipe: Recipe, card: ModelCard, cluster: Cluster, name: str, judge: Judge, own_runs: Sequence[Measurement] = ()) -> Ranked:
    """All layouts of one back end that are legal and fit, the fastest first; equals in time: larger micro-batches, fewer cuts."""
    setting = Setting(card, recipe, cluster, choose_dtype(recipe, cluster), engine_of(name, recipe.layout))
    weighed = space(recipe, card, cluster, freedom(partial(judge.refuse, recipe, card), cluster))
    good = legal(recipe, card, cluster, weighed)
    grid = weighed.take(good)
    peaks = peak_bytes(setting, grid)
    fits = peaks <= room_bytes(cluster)
    pool = grid if len(grid) else weighed
    leanest = pool.row(int(peaks.argmin()) if len(grid) else len(weighed) - 1)
    grid, peaks = grid.take(fits), peaks[fits]
    factor = factor_of(setting, modelled_seconds, own_runs) if len(grid) else Factor()
    seconds = step_seconds(setting, grid, factor)
    order = _order(grid, seconds)
    return Ranked(name, setting, factor, grid.take(order), peaks[order], seconds[order], len(weighed), leanest)


def _order(grid: Grid, seconds: Floats) -> Ints:
    if not len(grid):
        return np.zeros(0, np.int64)
    coarse = np.round(np.log(seconds) / SAME_SPEED)
    cuts = np.log2(grid.tp) + 2 * np.log2(grid.pp) + np.log2(grid.cp) + np.log2(grid.ep) + np.log2(grid.vpp)
    return np.lexsort((-grid.zero, grid.recompute, cuts, -grid.micro_size, coarse))


def choose_dtype(recipe: Recipe, cluster: Cluster) -> str:
    """Compute dtype: what the recipe says, else bfloat16 where the device has units for it."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    return "bfloat16" if cluster.device.has_bf16 else "float32"


def _accepted(ranked: Ranked, judge: Judge, wanted: int) -> list[int]:
    """Places of the fastest layouts that the back end takes, each with other degrees than those before."""
    taken: list[int] = []
    seen: set[tuple[object, ...]] = set()
    for i in range(min(len(ranked.grid), NUM_ASKED)):
        layout = ranked.grid.row(i)
        key = (layout.dp, layout.tp, layout.pp, layout.vpp, layout.ring, layout.ulysses, layout.ep, layout.zero, layout.recompute)
        if key in seen:
            continue
        if not judge.refuse(ranked.setting.recipe, ranked.setting.card, layout):
            seen.add(key)
            taken.append(i)
            if len(taken) == wanted:
                break
    return taken


def _why_not(recipe: Recipe, card: ModelCard, cluster: Cluster, ranked: Ranked, judge: Judge) -> list[Refusal]:
    """What stands in the way of the layout that comes closest."""
    assert ranked.leanest is not None
    layout = ranked.leanest
    broken = _without_consequences(recipe, illegal(recipe, card, cluster, layout))
    # bytes of a layout that cannot exist mean nothing
    full = [] if broken or len(ranked.grid) else too_big(ranked.setting, layout, judge)
    told = {refusal.where for refusal in broken}
    if {"interleaved", "dualpipev"} & {refusal.code for refusal in broken}:
        told.add("layout.schedule")
    said = [refusal for refusal in judge.refuse(recipe, card, layout) if refusal.where not in told]  # a rule has said it
    for_good = [refusal for refusal in said if not refusal.where.startswith("layout.")]
    return [*(for_good or said), *broken, *full]


def _without_consequences(recipe: Recipe, broken: list[Refusal]) -> list[Refusal]:
    """Of a degree that fits nowhere the first reason is told (its fix heeds all), and what it breaks in turn is not."""
    by_tp_only = [refusal for refusal in broken if refusal.where == "layout.tp"]
    silent = {refusal.code for refusal in by_tp_only[1:]}
    codes = {refusal.code for refusal in broken}
    if by_tp_only or "ulysses_heads" in codes:
        silent.add("sequence")
    if "layers" in codes:
        silent |= {"recompute_layers", "schedule"}
    broken = [refusal for refusal in broken if refusal.code not in silent]
    if "devices" not in codes:
        return broken
    # a tp that divides nothing is itself the reason
    by_tp = recipe.layout.dp == "auto" and any(refusal.where == "layout.tp" for refusal in broken)
    silent = {"global_batch", "sequence", "expert_mesh", "interleaved", *(["devices"] if by_tp else [])}
    return [refusal for refusal in broken if refusal.code not in silent]


def _plan(
    recipe: Recipe,
    card: ModelCard,
    cluster: Cluster,
    run_dir: str,
    found: list[tuple[Ranked, list[int]]],
    refused: list[Refusal],
    num_alternatives: int,
) -> Plan:
    best, places = found[0]
    layout = best.grid.row(places[0])
    stages = stage_terms(best.setting, layout)
    prediction = predict(best.setting, layout, best.factor)
    choices = [
        Choice(backend=r.backend, layout=r.grid.row(i), peak_bytes=int(r.peaks[i]), step_s=float(r.seconds[i]))
        for r, taken in found
        for i in taken
    ]
    choices.sort(key=lambda choice: choice.step_s)
    return Plan(
        recipe=recipe,
        card=card,
        backend=best.backend,
        cluster=cluster,
        layout=layout,
        dtype="bfloat16" if best.setting.dtype == "bfloat16" else "float32",
        run_dir=run_dir,
        memory=max(stages, key=lambda terms: sum(term.num_bytes for term in terms)),
        why=reasons(best.setting, layout, best.backend, best.num_weighed, len(best.grid), _slower_without(best, places[0])),
        stages=stages,
        prediction=prediction,
        placement=_placement(best, layout, prediction.step_s, cluster),
        alternatives=[c for c in choices if (c.backend, c.layout) != (best.backend, layout)][:num_alternatives],
        refused=refused,
    )


def _placement(ranked: Ranked, layout: Layout, train_s: float, cluster: Cluster) -> Placement | None:
    return place(ranked.setting, layout, train_s, cluster) if isinstance(ranked.setting.recipe.objective, PolicyGradient) else None


def _whole_step_s(ranked: Ranked, places: list[int], cluster: Cluster) -> float:
    """Predicted step of an engine's best layout; under reinforcement learning with the generation of answers."""
    train_s = float(ranked.seconds[places[0]])
    placement = _placement(ranked, ranked.grid.row(places[0]), train_s, cluster)
    return placement.step_s if placement else train_s


def _one_device() -> Refusal:
    return Refusal(
        code="one_device",
        where="objective.off_policy_steps",
        en="one device cannot generate and train at once; write off_policy_steps: 0",
        zh="单个设备无法同时生成与训练；请写 off_policy_steps: 0",
        fix={"objective.off_policy_steps": 0},
    )


def _slower_without(ranked: Ranked, place: int) -> dict[str, float | None]:
    """For each degree above 1 that the recipe left open: what doing without it would cost, as a share of the step."""
    costs: dict[str, float | None] = {}
    for name in ("tp", "pp", "vpp", "ring", "ulysses", "ep"):
        degrees = getattr(ranked.grid, name)
        if degrees[place] > 1 and getattr(ranked.setting.recipe.layout, name) == "auto":
            without = ranked.seconds[degrees == 1]
            costs[name] = float(without.min() / ranked.seconds[place] - 1) if len(without) else None
    return costs


def _once(refusals: list[Refusal]) -> list[Refusal]:
    """Each code once."""
    return list({refusal.code: refusal for refusal in reversed(refusals)}.values())[::-1]

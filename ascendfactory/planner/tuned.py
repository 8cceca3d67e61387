"""Layouts that vendors tuned by hand beside the planner's first choice for the same job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np

from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.plan import Cluster, Fact, Layout, Line, ModelCard
from ascendfactory.core.recipe import Batch, Data, Dpo, Full, Lora, Model, Pretrain, Recipe, Sft, Source
from ascendfactory.planner.advice import Judge, room_bytes
from ascendfactory.planner.calibrate import factor_of
from ascendfactory.planner.engines import engine_of
from ascendfactory.planner.grid import grid_of
from ascendfactory.planner.memory import GIB, Setting, peak_bytes
from ascendfactory.planner.rules import illegal, legal
from ascendfactory.planner.space import freedom, space
from ascendfactory.planner.time import modelled_seconds, step_seconds

BACKEND = "mindspeed_llm"
SAVINGS: tuple[dict[str, bool], ...] = ({}, {"reuse_params": True}, {"offload_optimizer": True})


class Tuned(Fact):
    """One official script."""

    model: str
    stage: str
    tuning: str
    rank: int | None
    device: str
    nodes: int
    nproc: int
    seq_len: int
    global_size: int
    padded: bool  # rows have seq_len tokens, or the data's own length
    layout: dict[str, Any]
    unmodelled: list[str]  # what the script also uses to save memory and the planner knows nothing of
    script: str

    def setting(self, **layout: bool) -> Setting:
        """The job, with settings of the layout that the search is to use."""
        objective = Pretrain() if self.stage == "pretrain" else Dpo() if self.stage == "dpo" else Sft()
        recipe = Recipe(
            model=Model(path=self.model),
            objective=objective,
            tuning=Lora(rank=self.rank or 8) if self.tuning == "lora" else Full(),
            data=Data(train=[Source(path="data.jsonl")], seq_len=self.seq_len),
            batch=Batch(global_size=self.global_size),
        )
        recipe = recipe.model_copy(update={"layout": recipe.layout.model_copy(update=layout)})
        cluster = Cluster(device=find_device(self.device), nodes=self.nodes, nproc=self.nproc)
        return Setting(self._card(), recipe, cluster, "bfloat16", engine_of(BACKEND))

    def _card(self) -> ModelCard:
        card = find_card(self.model)
        return card.model_copy(update={"max_seq_len": max(card.max_seq_len, self.seq_len)})  # the scripts stretch positions


@dataclass(frozen=True)
class Verdict:
    """What the planner says of a script."""

    row: Tuned
    broken: list[str]  # codes of rules
    peak_bytes: int
    room_bytes: int
    tuned_s: float
    best: Layout | None
    best_s: float
    reason: Line | None  # of a broken rule or too many bytes

    @property
    def fits(self) -> bool:
        """Whether the planner would accept the script."""
        return not self.broken and self.peak_bytes <= self.room_bytes


def tuned_rows() -> list[Tuned]:
    """The scripts of the catalogue."""
    text = (files("ascendfactory.catalog") / "hand_tuned.json").read_text(encoding="utf-8")
    return [Tuned.model_validate(row) for row in json.loads(text)["rows"]]


def verdicts(judge: Judge, rows: list[Tuned] | None = None) -> Iterator[Verdict]:
    """The planner's opinion of each script, and its own first choice."""
    for row in tuned_rows() if rows is None else rows:
        setting, layout = row.setting(), Layout(**row.layout)
        broken = [refusal.code for refusal in illegal(setting.recipe, setting.card, setting.cluster, layout)]
        grid = grid_of([layout])
        peak, room = int(peak_bytes(setting, grid)[0]), room_bytes(setting.cluster)
        factor = factor_of(setting, modelled_seconds)
        seconds = float(step_seconds(setting, grid, factor)[0])
        best, best_s = _first_choice(row, judge)
        yield Verdict(row, broken, peak, room, seconds, best, best_s, _reason(row, broken, peak, room))


def _first_choice(row: Tuned, judge: Judge) -> tuple[Layout | None, float]:
    """The fastest layout that fits, with what a script may switch on tried in order of cost."""
    best, best_s = None, np.inf
    for saving in SAVINGS:
        setting = row.setting(**saving)
        recipe, card, cluster = setting.recipe, setting.card, setting.cluster
        known = {refusal.code for refusal in judge.refuse(recipe, card, Layout(dp=cluster.num_devices, zero=1))}  # of the job itself
        grid = space(recipe, card, cluster, freedom(partial(judge.refuse, recipe, card), cluster))
        grid = grid.take(legal(recipe, card, cluster, grid))
        grid = grid.take(peak_bytes(setting, grid) <= room_bytes(cluster))
        if len(grid):
            seconds = step_seconds(setting, grid, factor_of(setting, modelled_seconds))
            taken = next(
                (i for i in np.argsort(seconds) if all(r.code in known for r in judge.refuse(recipe, card, grid.row(int(i))))), None
            )
            if taken is not None and seconds[taken] < best_s:
                best, best_s = grid.row(int(taken)), float(seconds[taken])
    return best, best_s


def _reason(row: Tuned, broken: list[str], peak: int, room: int) -> Line | None:
    size = f"{peak / GIB:.0f} of {room / GIB:.0f} GiB"
    size_zh = f"{peak / GIB:.0f} GiB，可用 {room / GIB:.0f}"
    if broken:
        return Line(en="rule: " + ", ".join(broken), zh="规则：" + "、".join(broken))
    if peak <= room:
        return None
    if not row.padded:
        return Line(
            en=f"rows are not padded: {row.seq_len} tokens is the longest, not the usual one ({size})",
            zh=f"各行不填充：{row.seq_len} 个 token 是最长而非通常的长度（{size_zh}）",
        )
    if row.unmodelled:
        return Line(en=f"{', '.join(row.unmodelled)}: not modelled ({size})", zh=f"{'、'.join(row.unmodelled)}：未建模（{size_zh}）")
    if peak <= find_device(row.device).memory_bytes:
        return Line(
            en=f"inside the memory, beyond the planner's margin of 8 % ({size})", zh=f"在设备内存之内，但超出规划器 8 % 的余量（{size_zh}）"
        )
    return Line(en=f"unexplained: {size}", zh=f"未解释：{size_zh}")

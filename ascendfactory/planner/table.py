"""The published minimum-device table beside the planner's own numbers, with the reason for each difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ascendfactory.catalog.read import find_card, find_device, list_cards
from ascendfactory.catalog.tables import MinDevices, min_devices
from ascendfactory.core.plan import Cluster, Layout, Line, ModelCard
from ascendfactory.core.recipe import Batch, Data, Full, LayoutSpec, Lora, Model, Recipe, Source
from ascendfactory.planner.advice import Judge
from ascendfactory.planner.fewest import Fewest, clusters, fewest_devices, fit_on

NODE_ROUNDING = 8  # its remark: below 8 devices, 8 are normally used
SAVINGS = {  # settings that are off by default, in order of cost
    "reuse_params": Line(
        en="parameter-replica reuse (reuse_params): the states alone do not fit otherwise",
        zh="参数副本复用（reuse_params）：否则仅状态就放不下",
    ),
    "offload_optimizer": Line(
        en="optimizer offloaded (offload_optimizer): the states alone do not fit otherwise",
        zh="优化器卸载（offload_optimizer）：否则仅状态就放不下",
    ),
}
TIGHT = 0.8  # share of a device's memory that leaves little for longer rows
SLOWER = 0.9  # tokens/s a device at the planner's number, over that at the published, below which the published one bought speed


@dataclass(frozen=True)
class Cell:
    """One published number and the planner's."""

    row: MinDevices
    seq_len: int
    found: Fewest | None  # with default settings
    saved: Fewest | None  # with one of SAVINGS, tried only where the other is above the published number
    reason: Line | None  # of a difference of more than 2 x, or of a number above the published

    @property
    def num_devices(self) -> int | None:
        """The planner's smallest number."""
        best = self.saved or self.found
        return best.cluster.num_devices if best else None

    @property
    def kept(self) -> bool:
        """Whether the planner needs no more devices than published."""
        return self.num_devices is not None and self.num_devices <= self.row.num_devices


def recipe_of(row: MinDevices, seq_len: int, **saving: Any) -> Recipe:
    """The recipe that a cell of the table stands for, with a setting of SAVINGS or none."""
    return Recipe(
        model=Model(path=row.model),
        tuning=Lora() if row.tuning == "lora" else Full(),
        data=Data(train=[Source(path="data.jsonl")], seq_len=seq_len),
        batch=Batch(global_size=8),
        layout=LayoutSpec(**saving),
    )


def cells(judges: Mapping[str, Judge], device: str = "snt9b", exact_only: bool = False, model: str | None = None) -> Iterator[Cell]:
    """Every full and LoRA cell of the published table for the back ends of `judges`.

    Args:
        exact_only: leave out the cells whose reading is inferred.
        model: only this model's.
    """
    for row in min_devices(model) if model else _all_rows():
        if row.device != device or row.tuning not in ("full", "lora") or row.backend not in judges:
            continue
        if exact_only and row.confidence != "exact":
            continue
        for seq_len in row.seq_lens:
            yield _cell(row, seq_len, judges[row.backend])


def _all_rows() -> Iterator[MinDevices]:
    for card in list_cards():
        yield from min_devices(card)


def _cell(row: MinDevices, seq_len: int, judge: Judge) -> Cell:
    card, device = find_card(row.model), find_device(row.device)
    found = fewest_devices(recipe_of(row, seq_len), card, device, row.backend, judge)
    if found and found.cluster.num_devices <= row.num_devices:
        return Cell(row, seq_len, found, None, _reason(row, seq_len, card, found, judge))
    if found is None and (said := _always_refused(row, seq_len, card, judge)):
        return Cell(row, seq_len, None, None, said)
    for key, words in SAVINGS.items():
        saved = fewest_devices(recipe_of(row, seq_len, **{key: True}), card, device, row.backend, judge, most=row.num_devices)
        if saved:
            return Cell(row, seq_len, found, saved, words)
    return Cell(row, seq_len, found, None, Line(en="above the published number", zh="高于已公布的数"))


def _always_refused(row: MinDevices, seq_len: int, card: ModelCard, judge: Judge) -> Line | None:
    """What the engine refuses on any number of devices."""
    for refusal in judge.refuse(recipe_of(row, seq_len), card, Layout()):
        if not refusal.where.startswith("layout."):
            return Line(en=refusal.en, zh=refusal.zh)
    return None


def _reason(row: MinDevices, seq_len: int, card: ModelCard, found: Fewest, judge: Judge) -> Line | None:
    """Why the published number is more than twice the planner's; what can be computed, in the order of how much it explains."""
    number = found.cluster.num_devices
    if 2 * number >= row.num_devices:
        return None
    if row.num_devices == NODE_ROUNDING:
        return Line(en="whole node: the published table rounds up to 8", zh="整机：已公布的表向上取到 8")
    there = next((c for c in _clusters_of(row) if c.num_devices == row.num_devices), None)
    on_more = fit_on(recipe_of(row, seq_len), card, there, row.backend, judge) if there else None
    if on_more and found.tokens_per_s_device < SLOWER * on_more.tokens_per_s_device:
        lost = 100 * (1 - found.tokens_per_s_device / on_more.tokens_per_s_device)
        return Line(
            en=f"speed: {lost:.0f} % fewer tokens/s a device on {number}",
            zh=f"速度：{number} 个设备时每设备 tokens/s 少 {lost:.0f} %",
        )
    used = found.peak_bytes / found.cluster.device.memory_bytes
    if used > TIGHT:
        return Line(en=f"margin: {used:.0%} of the memory on {number}", zh=f"余量：{number} 个设备时已用 {used:.0%} 内存")
    if on_more and on_more.layout.recompute != found.layout.recompute:
        return Line(
            en=f"recomputation: {number} devices need {found.layout.recompute}, {row.num_devices} {on_more.layout.recompute}",
            zh=f"重算：{number} 个设备需要 {found.layout.recompute}，{row.num_devices} 个用 {on_more.layout.recompute}",
        )
    faster = row.num_devices // number
    return Line(
        en=f"wall time: {number} devices hold it at {used:.0%} of their memory, {row.num_devices} are {faster} x as fast",
        zh=f"用时：{number} 个设备即可容纳（占内存 {used:.0%}），{row.num_devices} 个快 {faster} 倍",
    )


def _clusters_of(row: MinDevices) -> Iterator[Cluster]:
    return clusters(find_device(row.device), row.num_devices)

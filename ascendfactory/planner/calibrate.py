"""Measured rows, and what they say about a device and an engine.

Two figures are fitted to the rows of an engine on a kind of device: `slowdown`, by which the modelled step is multiplied,
and `routing`, by which the cost of sorting tokens for experts is multiplied before that. Both minimise the squared logarithm
of measured / predicted. The error band is twice the spread of the errors that the rows have when each is predicted from the others.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from pydantic import Field

from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.measured import Measurement
from ascendfactory.core.plan import Cluster, Fact, Layout, Line
from ascendfactory.core.recipe import Batch, Data, Full, Lora, Model, Recipe, Source
from ascendfactory.planner.engines import ENGINES, engine_of
from ascendfactory.planner.grid import grid_of
from ascendfactory.planner.memory import GIB, Setting, peak_bytes

ROUTING_STEPS = np.geomspace(0.1, 10, 61)  # multiples of the modelled routing cost that are tried
NARROWEST_BAND, UNMEASURED_BAND, BORROWED_BAND = 0.10, 0.5, 0.35
UNMEASURED = Line(en="no measured row: typical efficiencies", zh="没有实测数据：按典型效率估算")
NUM_OWN_RUNS = 5  # newest runs of the same model and tuning that count


@dataclass(frozen=True)
class Factor:
    """`slowdown` multiplies the modelled step, `routing` the cost of sorting tokens for experts; the clock is within 1 +- `band`."""

    slowdown: float = 1.0
    routing: float = 1.0
    band: float = UNMEASURED_BAND
    basis: Line = UNMEASURED


class Row(Fact):
    """A measured speed of the catalogue."""

    name: str
    backend: str
    device: str
    nodes: int
    nproc: int
    model: str
    shape: dict[str, Any] = Field(default={})  # what differs from the model's card
    tuning: str = "full"
    seq_len: int
    global_size: int
    layout: dict[str, Any]
    attended_tokens: int | None = None
    printed: float  # tokens/s as the source has it
    divisor: int  # devices that the figure is of
    held_out: str = ""
    source: str

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        return self.printed / self.divisor

    def setting(self) -> Setting:
        """The run that was measured."""
        device = find_device(self.device)
        card = find_card(self.model).model_copy(update=self.shape)
        recipe = Recipe(
            model=Model(path=self.model),
            data=Data(train=[Source(path="data.jsonl")], seq_len=self.seq_len),
            batch=Batch(global_size=self.global_size),
            tuning=Lora() if self.tuning == "lora" else Full(),
        )
        dtype = "bfloat16" if device.has_bf16 else "float32"
        cluster = Cluster(device=device, nodes=self.nodes, nproc=self.nproc)
        return Setting(card, recipe, cluster, dtype, engine_of(self.backend))

    def made_layout(self) -> Layout:
        """The layout that was measured, with its micro-batches."""
        layout = Layout(**self.layout)
        schedule = self.layout.get("schedule", "interleaved" if layout.vpp > 1 else "1f1b")
        num_micro = self.global_size // (layout.dp * layout.micro_size)
        return layout.model_copy(update={"num_micro": num_micro, "schedule": schedule})


class MemoryRow(Fact):
    """A published peak of memory."""

    model: str
    shape: dict[str, Any] = Field(default={})
    num_devices: int
    seq_len: int
    layout: dict[str, Any]
    compiled_loss: bool = False  # one kernel from the logits to their gradient: no fp32 copies in between
    gib: float
    source: str

    def predicted_gib(self) -> float:
        """What the planner says of it."""
        recipe = Recipe(model=Model(path=self.model), data=Data(train=[Source(path="d")], seq_len=self.seq_len), batch=Batch(global_size=8))
        cluster = Cluster(device=find_device("h100"), nodes=self.num_devices // 8, nproc=8)
        engine = engine_of("torchtitan")
        engine = replace(engine, logit_bytes=4, split_logit_bytes=4) if self.compiled_loss else engine
        setting = Setting(find_card(self.model).model_copy(update=self.shape), recipe, cluster, "bfloat16", engine)
        return float(peak_bytes(setting, grid_of([Layout(**self.layout)]))[0]) / GIB


def memory_rows() -> list[MemoryRow]:
    """The published peaks of the catalogue."""
    text = (files("ascendfactory.catalog") / "published_memory.toml").read_text(encoding="utf-8")
    return [MemoryRow.model_validate(row) for row in tomllib.loads(text)["rows"]]


@dataclass(frozen=True)
class Sample:
    """A row as the fit sees it: seconds a step."""

    name: str
    measured_s: float
    plain_s: float  # modelled, without routing
    routing_s: float


Timer = Callable[[Setting, Layout, int | None], tuple[float, float]]  # seconds without routing, and of routing


@cache
def rows() -> tuple[Row, ...]:
    """The measured rows of the catalogue."""
    text = (files("ascendfactory.catalog") / "calibration.toml").read_text(encoding="utf-8")
    return tuple(Row.model_validate(row) for row in tomllib.loads(text)["rows"])


def sample_of(row: Row, timer: Timer) -> Sample:
    """A catalogue row, modelled and measured."""
    setting, layout = row.setting(), row.made_layout()
    tokens = row.global_size * setting.row_tokens
    plain_s, routing_s = timer(setting, layout, row.attended_tokens)
    return Sample(row.name, tokens / row.tokens_per_s / layout.num_devices, plain_s, routing_s)


def fit(samples: Sequence[Sample]) -> tuple[float, float]:
    """slowdown and routing that fit best; (1, 1) without samples."""
    if not samples:
        return 1.0, 1.0
    routings = ROUTING_STEPS if sum(s.routing_s > 0 for s in samples) >= 2 else np.ones(1)
    logs = np.array([[math.log(s.measured_s / (s.plain_s + r * s.routing_s)) for s in samples] for r in routings])
    best = int(((logs - logs.mean(axis=1, keepdims=True)) ** 2).sum(axis=1).argmin())
    return float(np.exp(logs[best].mean())), float(routings[best])


def leave_one_out(samples: Sequence[Sample]) -> list[float]:
    """Predicted / measured seconds of each sample, from a fit to the others."""
    ratios = []
    for i, sample in enumerate(samples):
        slowdown, routing = fit([*samples[:i], *samples[i + 1 :]])
        ratios.append(slowdown * (sample.plain_s + routing * sample.routing_s) / sample.measured_s)
    return ratios


def factor_of(setting: Setting, timer: Timer, own_runs: Sequence[Measurement] = ()) -> Factor:
    """The factor for a setting: from the person's own runs of it, else from rows of the engine, else of engines like it."""
    mine = [r for r in own_runs if _alike(r, setting)][-NUM_OWN_RUNS:]
    published = _published(setting.engine.name, setting.cluster.device.kind, timer)
    return _from_runs(mine, timer, published.routing) if mine else published


@cache
def _published(engine: str, kind: str, timer: Timer) -> Factor:
    """What the catalogue's rows say of an engine on a kind of device."""
    fitting = [row for row in rows() if not row.held_out and find_device(row.device).kind == kind]
    own = [row for row in fitting if row.backend == engine]
    samples = [sample_of(row, timer) for row in own or _alike_rows(fitting, engine)]
    if not samples:
        return Factor()
    slowdown, routing = fit(samples)
    spread = _spread(leave_one_out(samples)) if len(samples) > 1 else UNMEASURED_BAND / 2
    band = max(NARROWEST_BAND, 2 * spread, 0.0 if own else BORROWED_BAND)
    names = ", ".join(sample.name for sample in samples)
    basis = Line(
        en=f"{len(samples)} measured rows {'' if own else 'of other engines '}on {kind} devices: {names}",
        zh=f"{kind} 设备上{'' if own else '其他引擎的'} {len(samples)} 条实测数据：{names}",
    )
    return Factor(slowdown, routing, band, basis)


def _alike_rows(fitting: list[Row], engine: str) -> list[Row]:
    """Rows of engines that compute alike: FSDP ones for FSDP ones, Megatron-like ones for their kind; else of any."""
    keeps_copy = engine_of(engine).keeps_copy
    return [row for row in fitting if ENGINES[row.backend].keeps_copy == keeps_copy] or fitting


def _from_runs(mine: Sequence[Measurement], timer: Timer, routing: float) -> Factor:
    logs = []
    for run in mine:
        modelled = Setting(run.card, run.recipe, run.cluster, run.dtype, engine_of(run.backend))
        plain_s, routing_s = timer(modelled, run.layout, None)
        logs.append(math.log(run.step_s / (plain_s + routing * routing_s)))
    slowdown = math.exp(sum(logs) / len(logs))
    spread = _spread([math.exp(value) / slowdown for value in logs])
    basis = Line(en=f"{len(mine)} of your own runs of this model on this device", zh=f"你自己在该设备上训练该模型的 {len(mine)} 次运行")
    return Factor(slowdown, routing, max(NARROWEST_BAND, 2 * spread), basis)


def _alike(run: Measurement, setting: Setting) -> bool:
    return (
        run.backend == setting.engine.name
        and run.cluster.device.name == setting.cluster.device.name
        and run.card.name == setting.card.name
        and run.recipe.tuning.kind == setting.recipe.tuning.kind
        and run.recipe.objective.kind == setting.recipe.objective.kind
    )


def _spread(ratios: Sequence[float]) -> float:
    """Root mean square of the logarithms."""
    return math.sqrt(sum(math.log(r) ** 2 for r in ratios) / len(ratios)) if ratios else 0.0

"""What back ends are known to do: support, smallest device counts, speed and features, each row with its source.

Stages: `pretrain`, `sft_full`, `sft_lora`, `dpo`, `grpo`, `dapo`, `ppo`; the stage matrix sums up the last four as `rl`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from ascendfactory.core.plan import Fact, ModelCard

NEWEST_RELEASE = "6.5.910"  # the newest AscendFactory release whose tables are here


class Support(Fact):
    """The stages in which a back end trains a model."""

    backend: str
    release: str  # of AscendFactory; "" for the embedded engine
    model: str  # name of the card
    stages: tuple[str, ...]  # empty: the back end is known not to train it
    tested_seq_len: int | None = None  # a length of 32k or more that a release was tested at
    options: dict[str, Any] = Field(default={})  # what else the row says: attention kernels, engines, parallelism
    source: str


class BackendStages(Fact):
    """The stages of a back end, whatever the model."""

    backend: str
    title: str
    stages: tuple[str, ...]
    source: str


class MinDevices(Fact):
    """The smallest tested number of devices."""

    model: str
    tuning: str  # full, lora, or the RL algorithm
    seq_lens: tuple[int, ...]
    backend: str
    device: str
    num_devices: int
    confidence: str  # exact or inferred
    basis: str  # how a merged cell of the source was read, see min_devices.json
    note: str = ""
    source: str


class Throughput(Fact):
    """A published speed; the source does not say whether it is per device or of the whole cluster."""

    backend: str
    model: str
    stage: str
    hardware: str
    device: str
    nodes: int
    nproc: int
    seq_len: int | None
    tokens_per_s: float
    source: str


class Feature(Fact):
    """A feature of MindSpeed-LLM, and where it works."""

    part: str
    kind: str
    scenario: str | None
    feature: str
    mcore: bool
    released: bool
    lora: bool | None
    source: str


def support(model: str | ModelCard | None = None, backend: str | None = None, release: str = NEWEST_RELEASE) -> list[Support]:
    """Which stages each back end supports, filtered by model and back end.

    Args:
        model: a card or the name of one; None for all. The row of the embedded engine needs the card, since
            it follows from the shape.
        backend: a back end; None for all.
        release: the AscendFactory release whose tables count.
    """
    name = model.name if isinstance(model, ModelCard) else model
    rows = [_native_support(model)] if isinstance(model, ModelCard) else []
    rows += [row for row in _support() if row.release == release and name in (None, row.model)]
    return [row for row in rows if backend in (None, row.backend)]


def min_devices(
    model: str | ModelCard,
    backend: str | None = None,
    device: str | None = None,
    tuning: str | None = None,
    seq_len: int | None = None,
) -> list[MinDevices]:
    """The smallest tested device counts of a model; a combination without a row is not supported by the source.

    Args:
        model: a card or the name of one.
        backend: a back end; None for all.
        device: `snt9b` or `snt9b23`; None for both.
        tuning: `full`, `lora`, `grpo`, `dapo` or `ppo`; None for all.
        seq_len: tokens of a row, one of the tested lengths; None for all.
    """
    name = model.name if isinstance(model, ModelCard) else model
    wanted = (("backend", backend), ("device", device), ("tuning", tuning))
    return [
        row
        for row in _min_devices()
        if row.model == name
        and all(value in (None, getattr(row, field)) for field, value in wanted)
        and (seq_len is None or seq_len in row.seq_lens)
    ]


@cache
def stage_matrix() -> tuple[BackendStages, ...]:
    """The stages of every back end, the embedded engine first."""
    return tuple(BackendStages.model_validate(row) for row in _table("stage_matrix.json")["rows"])


@cache
def throughput() -> tuple[Throughput, ...]:
    """Published training speeds."""
    table = _table("throughput.json")
    return tuple(Throughput.model_validate({**row, "source": table["source"]}) for row in table["rows"])


@cache
def features() -> tuple[Feature, ...]:
    """The features of MindSpeed-LLM."""
    table = _table("features.json")
    return tuple(Feature.model_validate({**row, "source": table["source"]}) for row in table["rows"])


def _native_support(card: ModelCard) -> Support:
    """The embedded engine trains dense text models, which is read off the card."""
    row = next(row for row in stage_matrix() if row.backend == "native")
    dense_text = card.moe is None and card.mla is None and card.vision is None
    return Support(backend="native", release="", model=card.name, stages=row.stages if dense_text else (), source=row.source)


@cache
def _support() -> tuple[Support, ...]:
    table = _table("support.json")
    return tuple(Support.model_validate({**row, "source": table["source"]}) for row in table["rows"])


@cache
def _min_devices() -> tuple[MinDevices, ...]:
    table = _table("min_devices.json")
    return tuple(row for packed in table["rows"] for row in _unpack(packed, table["devices"], table["source"]))


def _unpack(packed: dict[str, Any], devices: list[str], source: str) -> list[MinDevices]:
    """One row of the file holds every back end and device of (model, tuning, lengths)."""
    rows = []
    for backend, (*counts, confidence, basis) in packed["devices"].items():
        for device, count in zip(devices, counts, strict=True):
            if count is None:
                continue
            rows.append(
                MinDevices(
                    model=packed["model"],
                    tuning=packed["tuning"],
                    seq_lens=tuple(packed["seq_lens"]),
                    backend=backend,
                    device=device,
                    num_devices=count,
                    confidence=confidence,
                    basis=basis,
                    note=packed.get("note", ""),
                    source=source,
                )
            )
    return rows


def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files("ascendfactory.catalog") / name).read_text(encoding="utf-8"))
    return table

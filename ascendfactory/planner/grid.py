"""Many layouts at once: one numpy array a degree, so that thousands are priced in one pass.

Arrays have the shape [N] (one entry a layout); quantities of pipeline stages have [N, S].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Recompute, Schedule
from ascendfactory.core.stages import V_SHAPED

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Tuples = NDArray[np.object_]  # of tuples of ints

RECOMPUTES: tuple[Recompute, ...] = ("none", "norm", "selective", "full")  # in order of what they save
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")
OPTIM_DTYPES = ("float32", "bfloat16")
_WORDS: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTES, "schedule": SCHEDULES, "optim_dtype": OPTIM_DTYPES}
_FLAGS = ("sp", "recompute_in_advance", "offload_activations", "offload_optimizer", "reuse_params")


@dataclass(frozen=True)
class Grid:
    """The fields of `Layout` as arrays; words are numbers of their place in RECOMPUTES, SCHEDULES, OPTIM_DTYPES; flags are 0 or 1."""

    dp: Ints
    replicate: Ints
    zero: Ints
    tp: Ints
    sp: Ints
    pp: Ints
    vpp: Ints
    schedule: Ints
    stage_layers: Tuples  # layers of each chunk where the recipe says them, else ()
    overlap_chunks: Ints
    ring: Ints
    ulysses: Ints
    ep: Ints
    recompute: Ints
    recompute_layers: Ints
    recompute_in_advance: Ints
    offload_activations: Ints
    offload_optimizer: Ints
    optim_dtype: Ints
    reuse_params: Ints
    micro_size: Ints
    num_micro: Ints

    def __len__(self) -> int:
        """Number of layouts."""
        return len(self.dp)

    @property
    def cp(self) -> Ints:
        """Devices that share the tokens of a row."""
        return self.ring * self.ulysses

    @property
    def shard(self) -> Ints:
        """Devices over which data parallelism shards: dp / replicate x cp (1 where replicate is above dp, which no rule allows)."""
        return np.asarray(np.maximum(1, self.dp // self.replicate * self.cp))

    @property
    def num_devices(self) -> Ints:
        """Product of the degrees."""
        return self.dp * self.tp * self.pp * self.cp

    def take(self, index: Ints | Mask | slice) -> Grid:
        """Some of the layouts."""
        return Grid(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def row(self, index: int) -> Layout:
        """One layout."""
        values: dict[str, Any] = {f.name: int(getattr(self, f.name)[index]) for f in fields(self) if f.name != "stage_layers"}
        values["stage_layers"] = self.stage_layers[index]
        for name, words in _WORDS.items():
            values[name] = words[values[name]]
        for name in _FLAGS:
            values[name] = bool(values[name])
        return Layout(**values)

    def changed(self, **columns: Ints | int) -> Grid:
        """The same layouts with other values in some columns; a number stands for all of them."""
        wide: dict[str, Any] = {k: np.broadcast_to(np.asarray(v, np.int64), (len(self),)) for k, v in columns.items()}
        return replace(self, **wide)


def grid_of(layouts: Sequence[Layout]) -> Grid:
    """Layouts as arrays."""
    names = [f.name for f in fields(Grid) if f.name != "stage_layers"]
    columns: dict[str, Any] = {n: np.array([_number(n, getattr(layout, n)) for layout in layouts], np.int64) for n in names}
    return Grid(**columns, stage_layers=as_tuples([layout.stage_layers for layout in layouts]))


def as_tuples(values: Sequence[tuple[int, ...]]) -> Tuples:
    """An array [N] whose entries are tuples."""
    column = np.empty(len(values), np.object_)
    for i, value in enumerate(values):  # numpy would read a list of tuples as a matrix
        column[i] = value
    return column


def _number(name: str, value: Any) -> int:
    return _WORDS[name].index(value) if name in _WORDS else int(value)


def pipelines(grid: Grid) -> Iterator[tuple[Ints, Layout]]:
    """Groups of layouts that cut the model into the same stages: their places in the grid, and one of them."""
    is_v = np.isin(grid.schedule, [SCHEDULES.index(name) for name in V_SHAPED])
    keys = list(zip(grid.pp.tolist(), grid.vpp.tolist(), is_v.tolist(), grid.stage_layers.tolist(), strict=True))
    for key in dict.fromkeys(keys):
        index = np.array([i for i, other in enumerate(keys) if other == key], np.int64)
        yield index, grid.row(int(index[0]))


def joined(grids: Iterable[Grid]) -> Grid:
    """Several grids as one."""
    parts = list(grids)
    return Grid(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Grid)})

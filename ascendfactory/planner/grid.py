"""Many layouts at once: one numpy array a degree, so that thousands are priced in one pass.

Arrays have the shape [N] (one entry a layout); quantities of pipeline stages have [N, S].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendfactory.core.plan import Layout
from ascendfactory.core.recipe import Recompute, Schedule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

RECOMPUTES: tuple[Recompute, ...] = ("none", "norm", "selective", "full")  # in order of what they save
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved")
OPTIM_DTYPES = ("float32", "bfloat16")
_WORDS: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTES, "schedule": SCHEDULES, "optim_dtype": OPTIM_DTYPES}
_FLAGS = ("sp", "offload_activations", "offload_optimizer", "reuse_params")


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
    ring: Ints
    ulysses: Ints
    ep: Ints
    recompute: Ints
    recompute_layers: Ints
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
        values: dict[str, Any] = {f.name: int(getattr(self, f.name)[index]) for f in fields(self)}
        for name, words in _WORDS.items():
            values[name] = words[values[name]]
        for name in _FLAGS:
            values[name] = bool(values[name])
        return Layout(**values)

    def changed(self, **columns: Ints | int) -> Grid:
        """The same layouts with other values in some columns; a number stands for all of them."""
        return replace(self, **{k: np.broadcast_to(np.asarray(v, np.int64), (len(self),)) for k, v in columns.items()})


def grid_of(layouts: Sequence[Layout]) -> Grid:
    """Layouts as arrays."""
    columns = {f.name: np.array([_number(f.name, getattr(layout, f.name)) for layout in layouts], np.int64) for f in fields(Grid)}
    return Grid(**columns)


def _number(name: str, value: Any) -> int:
    return _WORDS[name].index(value) if name in _WORDS else int(value)


def joined(grids: Iterable[Grid]) -> Grid:
    """Several grids as one."""
    parts = list(grids)
    return Grid(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Grid)})


def ceil_div(a: Ints, b: Ints | int) -> Ints:
    """Division rounded up."""
    return -(-a // b)

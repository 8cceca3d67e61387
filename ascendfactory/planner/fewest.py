"""The inverse of planning: the smallest number of devices on which a recipe fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ascendfactory.core.plan import Cluster, Device, Layout, ModelCard
from ascendfactory.core.recipe import Recipe
from ascendfactory.planner.advice import Judge, room_bytes
from ascendfactory.planner.calibrate import factor_of
from ascendfactory.planner.engines import engine_of
from ascendfactory.planner.memory import Setting, peak_bytes
from ascendfactory.planner.rules import legal
from ascendfactory.planner.search import choose_dtype
from ascendfactory.planner.space import freedom, space
from ascendfactory.planner.time import modelled_seconds, step_seconds

MOST_DEVICES = 1024
ROWS_A_DEVICE = 4  # the batch grows with the devices, so that pipelines have micro-batches


@dataclass(frozen=True)
class Fewest:
    """The smallest cluster that holds a recipe, and the fastest layout on it."""

    cluster: Cluster
    layout: Layout
    peak_bytes: int
    tokens_per_s_device: float


def fewest_devices(
    recipe: Recipe, card: ModelCard, device: Device, backend: str, judge: Judge, most: int = MOST_DEVICES, margin: float = 1.0
) -> Fewest | None:
    """The smallest cluster of a device that some legal layout of a back end fits on; None if even `most` devices are too few.

    Args:
        margin: share of the usable memory that may be taken.

    Counts are powers of two up to a node, then powers of two and their thirds in nodes. The batch is made a multiple of the devices.
    """
    for cluster in clusters(device, most):
        found = fit_on(recipe, card, cluster, backend, judge, margin)
        if found:
            return found
    return None


def fit_on(recipe: Recipe, card: ModelCard, cluster: Cluster, backend: str, judge: Judge, margin: float = 1.0) -> Fewest | None:
    """The fastest fitting layout on a cluster, or None."""
    recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_size": ROWS_A_DEVICE * cluster.num_devices})})
    setting = Setting(card, recipe, cluster, choose_dtype(recipe, cluster), engine_of(backend, recipe.layout))
    grid = space(recipe, card, cluster, freedom(partial(judge.refuse, recipe, card), cluster))
    grid = grid.take(legal(recipe, card, cluster, grid))
    if not len(grid):
        return None
    peaks = peak_bytes(setting, grid)
    fits = peaks <= margin * room_bytes(cluster)
    if not fits.any():
        return None
    grid, peaks = grid.take(fits), peaks[fits]
    seconds = step_seconds(setting, grid, factor_of(setting, modelled_seconds))
    for i in np.argsort(seconds):
        layout = grid.row(int(i))
        if not judge.refuse(recipe, card, layout):
            speed = recipe.rows_a_step * setting.row_tokens / float(seconds[i]) / cluster.num_devices
            return Fewest(cluster, layout, int(peaks[i]), speed)
    return None


def clusters(device: Device, most: int) -> Iterator[Cluster]:
    """Clusters of growing size."""
    nproc = 1
    while nproc < device.devices_per_node and nproc <= most:
        yield Cluster(device=device, nodes=1, nproc=nproc)
        nproc *= 2
    sizes = sorted({base << shift for base in (1, 3) for shift in range(12)})
    for nodes in sizes:
        if nodes * device.devices_per_node > most:
            return
        yield Cluster(device=device, nodes=nodes, nproc=device.devices_per_node)

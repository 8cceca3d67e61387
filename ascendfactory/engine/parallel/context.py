"""Context parallelism: the tokens of a row spread over the devices of ring and Ulysses.

Shape letters: B rows, S cells of a row (whole in a MicroBatch, this device's part in a LocalBatch), N trained positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendfactory.core.plan import Layout
from ascendfactory.engine.blocks import Documents, Span, whole_rows
from ascendfactory.engine.data.batch import IGNORED, MicroBatch
from ascendfactory.engine.mesh import Mesh
from ascendfactory.engine.parallel.balance import assign

KERNEL_MULTIPLE = 8  # widths of matrices that all devices like


@dataclass(frozen=True)
class LocalBatch:
    """A device's tokens of a micro-batch, and where the documents lie."""

    input_ids_BS: Tensor  # noqa: N815 - int64
    labels_BS: Tensor  # noqa: N815 - int64, shifted before the rows were cut; -100 where nothing is trained
    positions_BS: Tensor  # noqa: N815 - int64, in the document
    trained_at_N: Tensor  # noqa: N815 - int64, where labels are, as positions in the flattened [B·S]
    documents: Documents

    def to(self, device: torch.device | str) -> LocalBatch:
        """The same on another device."""
        names = ("input_ids_BS", "labels_BS", "positions_BS", "trained_at_N")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def width_multiple(layout: Layout) -> int:
    """What the width of micro-batches must be a multiple of, so that every device gets equally many tokens.

    Halves of a ring's share, so that one document is cut evenly; tensor-parallel parts too under sequence parallelism.
    """
    return math.lcm(KERNEL_MULTIPLE, 2 * layout.ring if layout.ring > 1 else 1, layout.cp * (layout.tp if layout.sp else 1))


def cut(batch: MicroBatch, mesh: Mesh) -> LocalBatch:
    """This device's part of a micro-batch that all partners of ring and Ulysses were given whole.

    Best on tensors still in CPU memory: the part is then all that goes to the device.

    Raises:
        ValueError: the width cannot be shared out evenly (see `width_multiple`).
    """
    num_rows, width = batch.input_ids_BS.shape
    if mesh.cp == 1:
        documents = whole_rows(batch.lengths, width)
        return LocalBatch(batch.input_ids_BS, batch.labels_BS, batch.positions_BS, batch.trained_at_N, documents)
    if width % mesh.cp:
        raise ValueError(f"rows of {width} tokens cannot be shared by ring x ulysses = {mesh.cp} devices")
    shares, order_BS = lay_out(batch.lengths, width, mesh.ring.size, mesh.ring.rank)
    documents = Documents(shares, num_rows * width // mesh.ring.size, mesh.ring, mesh.ulysses)
    start, length = mesh.ulysses.rank * width // mesh.cp, width // mesh.cp
    order = torch.from_numpy(order_BS[:, start : start + length].copy()).to(batch.input_ids_BS.device)
    ids_BS, labels_BS, positions_BS = (t.gather(1, order) for t in (batch.input_ids_BS, batch.labels_BS, batch.positions_BS))
    return LocalBatch(ids_BS, labels_BS, positions_BS, (labels_BS.flatten() != IGNORED).nonzero().flatten(), documents)


def lay_out(lengths: list[list[int]], width: int, ring: int, rank: int) -> tuple[list[list[Span]], NDArray[np.int64]]:
    """How the rows of a micro-batch lie on the devices of a ring.

    Returns:
        The spans of every device, and [B, S/ring]: which cell of the whole row stands in each cell of this device.
    """
    local_width = width // ring
    spans: list[list[Span]] = [[] for _ in range(ring)]
    order = np.empty((len(lengths), local_width), np.int64)
    for row, row_lengths in enumerate(lengths):
        begins = np.cumsum([0, *row_lengths])
        padding = int(begins[-1])
        for device, share in enumerate(assign(row_lengths, width, ring)):
            at = 0
            for document, start, stop in share:
                spans[device].append(Span((row, document), start, stop, row * local_width + at))
                if device == rank:
                    order[row, at : at + stop - start] = np.arange(begins[document] + start, begins[document] + stop)
                at += stop - start
            if device == rank:
                order[row, at:] = np.arange(padding, padding + local_width - at)
            padding += local_width - at
    return spans, order

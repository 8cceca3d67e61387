"""Rows → the tensors of a micro-batch.

Shape letters: B rows of a micro-batch, S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
PADDING = -1


@dataclass(frozen=True, slots=True)
class Row:
    """The documents of a row: (ids, mask) each; none in a row that only fills the last step."""

    documents: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]]
    places: Sequence[str]  # the record of each document


@dataclass(frozen=True)
class MicroBatch:
    """What a model computes at once. Padding stands at the end of rows."""

    input_ids_BS: Tensor  # noqa: N815 - int64; pad id in padded cells
    labels_BS: Tensor  # noqa: N815 - int64, already shifted: the next token of the same document if it is trained, else -100
    positions_BS: Tensor  # noqa: N815 - int64, from 0 in every document
    documents_BS: Tensor  # noqa: N815 - int32: 0, 1, 2 ... along a row; -1 in padded cells
    trained_at_N: Tensor  # noqa: N815 - int64: where labels are, as positions in the flattened [B·S]; known before the device is asked
    lengths: list[list[int]]  # tokens of each document of each row

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(self, **moved)


_TENSORS = ("input_ids_BS", "labels_BS", "positions_BS", "documents_BS", "trained_at_N")


def assemble(rows: Sequence[Row], pad_id: int, *, multiple: int, min_width: int = 0) -> MicroBatch:
    """A micro-batch as wide as its longest row.

    Args:
        rows: B rows.
        pad_id: what padded cells hold.
        multiple: the width is rounded up to a multiple of this.
        min_width: the least width.
    """
    longest = max(sum(len(ids) for ids, _ in row.documents) for row in rows)
    width = -(-max(longest, min_width, 1) // multiple) * multiple
    shape = (len(rows), width)
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    positions = np.empty(shape, np.int64)
    documents = np.full(shape, PADDING, np.int32)
    count_up = np.arange(width)
    for b, row in enumerate(rows):
        start = 0
        for number, (ids, trained) in enumerate(row.documents):
            end = start + len(ids)
            input_ids[b, start:end] = ids
            labels[b, start : end - 1] = np.where(trained[1:], ids[1:].astype(np.int64), IGNORED)
            positions[b, start:end] = count_up[: len(ids)]
            documents[b, start:end] = number
            start = end
        positions[b, start:] = count_up[: width - start]
    lengths = [[len(ids) for ids, _ in row.documents] for row in rows]
    trained_at = np.flatnonzero(labels != IGNORED)
    tensors = [torch.from_numpy(array) for array in (input_ids, labels, positions, documents, trained_at)]
    return MicroBatch(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], lengths)


def count_trained_tokens(batches: Sequence[MicroBatch]) -> int:
    """Positions of the micro-batches that have a label."""
    return sum(len(batch.trained_at_N) for batch in batches)

"""Samples → rows: packing, and the order of rows in an epoch. Pure functions of their arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
WINDOW_SAMPLES = 4096
WINDOW_STEPS = 64


@dataclass(frozen=True)
class RowTable:
    """Which samples share a row: row r holds samples[offsets[r]:offsets[r + 1]]."""

    offsets: Ints  # [rows + 1]
    samples: Ints  # [samples]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.offsets.size - 1)


def pack_rows(lengths: NDArray[np.integer], order: Ints, seq_len: int, window: int = WINDOW_SAMPLES) -> RowTable:
    """Packs samples into rows of at most seq_len tokens: first-fit decreasing inside windows.

    Each window of consecutive samples of `order` is packed by itself: the longest sample first, into the
    first row that has room (Johnson 1973: at most 11/9 of the best number of rows, plus one).

    Args:
        lengths: tokens of every sample, each in 1..seq_len.
        order: the samples to pack, in the order in which windows take them.

    Raises:
        ValueError: a sample is longer than a row.
    """
    if order.size and int(lengths[order].max()) > seq_len:
        raise ValueError(f"a sample has {int(lengths[order].max())} tokens and a row {seq_len}")
    samples, sizes = [], []
    for start in range(0, order.size, window):
        members = order[start : start + window]
        by_length = np.argsort(-lengths[members].astype(np.int64), kind="stable")
        rows = np.array(_first_fit(lengths[members[by_length]].tolist(), seq_len), np.int64)
        by_row = np.argsort(rows, kind="stable")
        samples.append(members[by_length[by_row]])
        sizes.append(np.bincount(rows))
    counts = np.concatenate(sizes) if sizes else np.zeros(0, np.int64)
    return RowTable(np.r_[0, np.cumsum(counts)].astype(np.int64), np.concatenate(samples) if samples else np.zeros(0, np.int64))


def _first_fit(lengths: list[int], seq_len: int) -> list[int]:
    """The row of each sample. `room` is a tree of maxima: leaves are the rows' free tokens."""
    num_leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [seq_len] * (2 * num_leaves)
    rows = []
    for length in lengths:
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < length:
                node += 1
        rows.append(node - num_leaves)
        left = room[node] = room[node] - length
        while node > 1:
            sibling = room[node ^ 1]
            node >>= 1
            best = left if left > sibling else sibling
            if room[node] == best:
                break
            left = room[node] = best
    return rows


def single_rows(order: Ints) -> RowTable:
    """One sample a row, in the given order."""
    return RowTable(np.arange(order.size + 1, dtype=np.int64), order)


def shuffled(count: int, *seed: int) -> Ints:
    """A permutation of range(count) that depends on the seed numbers alone."""
    return np.random.default_rng(list(seed)).permutation(count)


def group_by_length(lengths: NDArray[np.integer], order: Ints, global_size: int, head: int, *seed: int) -> Ints:
    """Reorders rows so that the rows of a step have similar lengths.

    Rows are sorted within windows of 64 steps, cut into steps, and the steps are shuffled.

    Args:
        lengths: tokens of every row.
        order: rows in shuffled order.
        global_size: rows a step.
        head: rows at the front that belong to a step begun in the epoch before; they keep their place.
        seed: numbers that decide the order of steps.
    """
    body = order[head:].copy()
    window = WINDOW_STEPS * global_size
    for start in range(0, body.size, window):
        part = body[start : start + window]
        body[start : start + window] = part[np.argsort(lengths[part], kind="stable")]
    whole = body.size // global_size
    steps = body[: whole * global_size].reshape(whole, global_size)[shuffled(whole, *seed)]
    return np.concatenate([order[:head], steps.ravel(), body[whole * global_size :]])

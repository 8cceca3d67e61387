"""The row table: which stretch of which store lies in which row, and the order of rows in each epoch.

Packing is done once for a set of sources, a row length and a seed; an epoch only permutes rows. So the number of
rows is known exactly, and any position is reached without passing over those before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Data
from ascendfactory.engine.data.batch import Row
from ascendfactory.engine.data.cache import build_once
from ascendfactory.engine.data.counts import Counts
from ascendfactory.engine.data.cut import Pieces, cut
from ascendfactory.engine.data.pack import Ints, group_by_length, pack_rows, shuffled, single_rows
from ascendfactory.engine.data.store import TokenStore

VERSION = 1
ARRAYS = ("offsets", "store", "start", "length", "sequence")
Split = Literal["train", "eval"]


@dataclass(frozen=True)
class _Placed:
    """Pieces of all stores, weights applied. n = pieces."""

    store: NDArray[np.int16]  # [n]
    start: Ints  # [n] first token in the store
    length: NDArray[np.int32]  # [n]
    sequence: Ints  # [n] sequence of the store
    trained: Ints  # [n] tokens that become labels


class TableRows:
    """Rows in a fixed order, forever: epoch after epoch, each permuted anew; `None` after the last one if there is one."""

    def __init__(self, folder: Path, stores: Sequence[TokenStore], *, group_size: int, seed: int, shuffle: bool, by_length: bool) -> None:
        self.counts = Counts(**json.loads((folder / "counts.json").read_text()))
        self.name = folder.name
        self.position = 0  # rows taken so far, over all epochs
        self.last_row: int | None = None  # rows after this many are empty
        self._offsets, self._store, self._start, self._length, self._sequence = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS
        )
        self._stores = stores
        self._group_size, self._seed, self._shuffle, self._by_length = group_size, seed, shuffle, by_length
        self._order: tuple[int, Ints] = (-1, np.zeros(0, np.int64))

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return int(self._offsets.size - 1)

    @property
    def epoch(self) -> float:
        """Epochs taken so far."""
        position = self.position if self.last_row is None else min(self.position, self.last_row)
        return position / self.num_rows

    def take(self, count: int, wanted: Sequence[int]) -> list[Row]:
        """Moves on by `count` rows and reads those numbered `wanted` (0 .. count-1) among them."""
        rows = [self._row(self.position + number) for number in wanted]
        self.position += count
        return rows

    def state(self) -> dict[str, int]:
        """The position; small and independent of it."""
        return {"rows": self.position}

    def seek(self, state: dict[str, int]) -> None:
        """Goes to a position at once."""
        self.position = state["rows"]

    def _row(self, position: int) -> Row:
        if self.last_row is not None and position >= self.last_row:
            return Row([], [])
        epoch, number = divmod(position, self.num_rows)
        row = int(self._epoch_order(epoch)[number])
        documents, places = [], []
        for piece in range(int(self._offsets[row]), int(self._offsets[row + 1])):
            store = self._stores[int(self._store[piece])]
            start, length = int(self._start[piece]), int(self._length[piece])
            documents.append((store.ids(start, length), store.trained(start, length)))
            places.append(store.place(int(self._sequence[piece])))
        return Row(documents, places)

    def _epoch_order(self, epoch: int) -> Ints:
        if self._order[0] != epoch:
            order = shuffled(self.num_rows, self._seed, 1, epoch) if self._shuffle else np.arange(self.num_rows)
            if self._by_length and self._shuffle:
                head = min(-epoch * self.num_rows % self._group_size, self.num_rows)
                order = group_by_length(self._length, order, self._group_size, head, self._seed, 2, epoch)
            self._order = (epoch, order)
        return self._order[1]


def open_rows(stores: Sequence[TokenStore], weights: Sequence[float], data: Data, seed: int, split: Split, group_size: int) -> TableRows:
    """The rows of the training or the evaluation split, packed now if they are not in the cache.

    Args:
        weights: passes over each store in an epoch.
        group_size: rows of a step, among which lengths are kept similar where rows are not packed.

    Raises:
        UserError: a sample is too long (`overlong: stop`), or nothing is left to train on.
    """
    fraction = data.eval_fraction if not data.eval else 0.0
    shuffle = data.shuffle and split == "train"
    facts = [VERSION, [store.name for store in stores], list(weights), seed, data.seq_len, data.packing == "packed", data.overlong]
    facts += [fraction, split, shuffle]
    name = "rows-" + hashlib.blake2b(orjson.dumps(facts), digest_size=12).hexdigest()

    def build(folder: Path) -> None:
        placed, counts = _place(stores, weights, data, seed, split, fraction)
        if placed.length.size == 0:
            raise _nothing_left(counts, data, split)
        order = shuffled(placed.length.size, seed, 0) if shuffle else np.arange(placed.length.size)
        table = pack_rows(placed.length, order, data.seq_len) if data.packing == "packed" else single_rows(order)
        np.save(folder / "offsets.npy", table.offsets)
        for array in ARRAYS[1:]:
            np.save(folder / f"{array}.npy", getattr(placed, array)[table.samples])
        counts.rows, counts.fill = table.num_rows, counts.tokens / (table.num_rows * data.seq_len)
        (folder / "counts.json").write_text(json.dumps(counts.as_dict(), ensure_ascii=False))

    folder = build_once(Path(data.cache_dir).expanduser(), name, build, lambda old: (old / "counts.json").exists())
    return TableRows(folder, stores, group_size=group_size, seed=seed, shuffle=shuffle, by_length=data.packing == "dynamic")


def _nothing_left(counts: Counts, data: Data, split: Split) -> UserError:
    return UserError(
        f"data.{split}",
        f"no sample is left of {counts.records} records ({counts.bad} bad, {counts.dropped} longer than seq_len {data.seq_len}, "
        f"{counts.untrained} without a trained token, {counts.held_out} held out); run the preview to see the samples",
        f"{counts.records} 条记录中没有剩下样本（{counts.bad} 条有误，{counts.dropped} 条超过 seq_len {data.seq_len}，"
        f"{counts.untrained} 条没有可训练词元，{counts.held_out} 条留作评估）；请用 preview 查看样本",
    )


def _place(
    stores: Sequence[TokenStore], weights: Sequence[float], data: Data, seed: int, split: Split, fraction: float
) -> tuple[_Placed, Counts]:
    counts = Counts()
    parts = []
    for number, (store, weight) in enumerate(zip(stores, weights, strict=True)):
        read = store.counts
        counts.add(Counts(records=read.records, untrained=read.untrained, split=read.split, bad=read.bad, bad_places=read.bad_places))
        held_out = store.keys < np.uint64(int(fraction * 2**64)) if fraction else np.zeros(store.lengths.size, bool)
        mine = np.flatnonzero(~held_out if split == "train" else held_out) if fraction else np.arange(store.lengths.size)
        counts.held_out += int(held_out.sum())
        mine = mine[_repeat(mine.size, weight, seed, number)]
        pieces = cut(
            store.lengths[mine],
            store.first_trained[mine],
            store.is_document[mine],
            data.seq_len,
            data.overlong,
            lambda at, store=store, mine=mine: store.place(int(mine[at])),  # type: ignore[misc]
        )
        counts.add(Counts(truncated=pieces.truncated, dropped=pieces.dropped, untrained=pieces.untrained))
        sequence = mine[pieces.sample]
        start = store.offsets[sequence] + pieces.start
        counts.samples += int(np.unique(pieces.sample).size)
        parts.append((np.full(sequence.size, number), start, pieces.length, sequence, _count_trained(store, sequence, pieces, start)))
    store_, start_, length_, sequence_, trained_ = (np.concatenate(column) for column in zip(*parts, strict=True))
    counts.pieces = int(length_.size)
    counts.tokens, counts.trained_tokens = int(length_.sum()), int(trained_.sum())
    return _Placed(store_.astype(np.int16), start_, length_.astype(np.int32), sequence_, trained_), counts


def _repeat(count: int, weight: float, seed: int, source: int) -> Ints:
    """Whole passes, then a random share for the rest of the weight."""
    whole = int(weight)
    share = round((weight - whole) * count)
    picked = np.sort(shuffled(count, seed, 3, source)[:share])
    return np.concatenate([np.tile(np.arange(count), whole), picked])


def _count_trained(store: TokenStore, sequence: Ints, pieces: Pieces, start: Ints) -> Ints:
    """Labels of every piece; every token of a document but its first; conversations that were cut are looked at."""
    is_document = store.is_document[sequence]
    trained = np.where(is_document, pieces.length - 1, store.num_trained[sequence]).astype(np.int64)
    shortened = np.flatnonzero((pieces.length != store.lengths[sequence]) & ~is_document)
    for at in shortened:
        trained[at] = np.count_nonzero(store.trained(int(start[at]), int(pieces.length[at]))[1:])
    return trained

"""Rows out of sets larger than the disk: read, tokenised and packed window by window while training.

A cursor says where each source stands (pass, file, byte or row). A window is a function of the cursor at its start,
so a run resumes by seeking there and tokenising one window again, wherever it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Data
from ascendfactory.engine.data.batch import Row
from ascendfactory.engine.data.chat import Encoder
from ascendfactory.engine.data.counts import Counts
from ascendfactory.engine.data.cut import cut
from ascendfactory.engine.data.pack import group_by_length, pack_rows, shuffled, single_rows
from ascendfactory.engine.data.records import DataFile, Item, num_rows, read_file
from ascendfactory.engine.data.store import OpenedSource
from ascendfactory.engine.data.tokenise import RawRecord, TokenBlock, place_of, tokenise

WINDOW_RECORDS = 4096
WINDOW_BYTES = 32 << 20


@dataclass(frozen=True)
class Cursor:
    """Where a source stands."""

    passes: int = 0  # times it was read to its end
    file: int = 0
    offset: int = 0  # bytes or rows into the file
    index: int = 0  # lines or rows before it


@dataclass
class _Window:
    """Rows made from the records between two sets of cursors."""

    rows: list[Row]
    after: list[Cursor]
    counts: Counts


class StreamSource:
    """One source as an endless sequence of records with positions."""

    def __init__(self, opened: OpenedSource) -> None:
        for file in opened.files:
            if not file.seekable:
                raise _not_seekable(file, opened.where)
        self.opened = opened
        self.weight = opened.source.weight
        self.records_read = 0
        self._sizes = [max(file.num_bytes, 1) for file in opened.files]
        self._sizes_before = np.r_[0, np.cumsum(self._sizes)].tolist()
        self._open: tuple[Cursor, Iterator[Item]] | None = None

    @cached_property
    def _units(self) -> list[int]:
        """What offsets of each file count up to."""
        files = zip(self.opened.files, self._sizes, strict=True)
        return [max(num_rows(file), 1) if file.kind in ("parquet", "arrow") else size for file, size in files]

    def progress(self, at: Cursor) -> float:
        """Passes made so far, as a number that grows with every record."""
        if at.file == len(self._sizes):
            return at.passes + 1.0
        done = self._sizes_before[at.file] + self._sizes[at.file] * min(at.offset / self._units[at.file], 1.0)
        return at.passes + float(done) / float(self._sizes_before[-1])

    def read(self, at: Cursor) -> tuple[RawRecord, Cursor]:
        """The record at a position and the position after it; goes on from an open file where it can.

        Raises:
            UserError: the source holds no record at all.
        """
        began = at
        while True:
            if at.file == len(self._sizes):
                at = Cursor(passes=at.passes + 1)
                if at.passes > began.passes + 1:
                    path = self.opened.source.path
                    raise UserError(self.opened.where, f"{path} holds no record", f"{path} 中没有记录")
            if self._open is None or self._open[0] != at:
                self._open = (at, read_file(self.opened.files[at.file], at.offset, at.index))
            items = self._open[1]
            item = next(items, None)
            if item is None:
                at, self._open = Cursor(at.passes, at.file + 1), None
                continue
            raw, index, offset = item
            after = replace(at, offset=offset, index=index)
            self._open = (after, items)
            self.records_read += 1
            return RawRecord(raw, at.file, index), after


class StreamRows:
    """Rows of a stream, in an order that depends on the sources, the seed and the row length alone."""

    def __init__(self, sources: Sequence[OpenedSource], encoder: Encoder, data: Data, seed: int, group_size: int) -> None:
        if data.eval_fraction and not data.eval:
            raise UserError(
                "data.eval_fraction",
                "a stream cannot hold out a share of what it has not read; name held-out files in data.eval",
                "流式读取时无法预留尚未读到的样本；请在 data.eval 中指定评估文件",
            )
        self.counts = Counts()
        self._sources = [StreamSource(source) for source in sources]
        self._encoder, self._data, self._seed, self._group_size = encoder, data, seed, group_size
        self._before = [Cursor() for _ in sources]
        self._number = 0  # of the window
        self._row = 0  # next row in the window
        self._window: _Window | None = None
        self._thread = ThreadPoolExecutor(1, "data")
        self._next: Future[_Window] | None = None

    @property
    def records_read(self) -> int:
        """Records read by this process since it started."""
        return sum(source.records_read for source in self._sources)

    @property
    def mean_row_tokens(self) -> float:
        """Tokens of a row, averaged over the current window."""
        rows = self._current().rows
        return sum(len(ids) for row in rows for ids, _ in row.documents) / len(rows)

    @property
    def epoch(self) -> float:
        """Epochs taken so far, by windows begun."""
        return min(source.progress(at) / source.weight for source, at in zip(self._sources, self._before, strict=True))

    def take(self, count: int, wanted: Sequence[int]) -> list[Row]:
        """Moves on by `count` rows and returns those numbered `wanted` among them."""
        rows: list[Row] = []
        while len(rows) < count:
            window = self._current()
            found = window.rows[self._row : self._row + count - len(rows)]
            rows += found
            self._row += len(found)
            if self._row == len(window.rows):
                self._advance(window)
        return [rows[number] for number in wanted]

    def state(self) -> dict[str, Any]:
        """The cursors at the start of the current window and the row in it."""
        return {"window": self._number, "row": self._row, "cursors": [asdict(cursor) for cursor in self._before]}

    def seek(self, state: dict[str, Any]) -> None:
        """Goes to a position: a seek, and one window to tokenise."""
        self._wait()
        self._before = [Cursor(**cursor) for cursor in state["cursors"]]
        self._number, self._row, self._window = state["window"], state["row"], None

    def peek(self) -> Counts:
        """Counts of the current window, for checks before the first step."""
        return self._current().counts

    def _current(self) -> _Window:
        if self._window is None:
            self._window = self._next.result() if self._next else self._make(self._before, self._number)
            self.counts.add(self._window.counts)
            self.counts.rows += len(self._window.rows)
            self.counts.fill = self.counts.tokens / (self.counts.rows * self._data.seq_len)
            self._next = self._thread.submit(self._make, self._window.after, self._number + 1)
        return self._window

    def _advance(self, window: _Window) -> None:
        self._before, self._number, self._row, self._window = window.after, self._number + 1, 0, None

    def _wait(self) -> None:
        """The background window reads the same open files: it must end before they are moved."""
        if self._next is not None:
            self._next.exception()
            self._next = None

    def _make(self, before: Sequence[Cursor], number: int) -> _Window:
        """The window that starts at some cursors; one without any row is joined to the next."""
        counts = Counts()
        after = list(before)
        while True:
            picked, after = self._read(after)
            if rows := self._pack(picked, number, counts):
                return _Window(rows, after, counts)
            if all(now.passes > then.passes + 1 for now, then in zip(after, before, strict=True)):
                raise UserError("data.train", "a whole pass gave no sample to train on", "完整读取一遍后没有可训练的样本")

    def _read(self, before: Sequence[Cursor]) -> tuple[list[list[RawRecord]], list[Cursor]]:
        """Records of a window, by source: each is taken from the source that is furthest behind its weight."""
        after = list(before)
        behind = [source.progress(at) / source.weight for source, at in zip(self._sources, after, strict=True)]
        picked: list[list[RawRecord]] = [[] for _ in self._sources]
        num_records = num_bytes = 0
        while num_records < WINDOW_RECORDS and num_bytes < WINDOW_BYTES:
            choice = behind.index(min(behind))
            record, after[choice] = self._sources[choice].read(after[choice])
            behind[choice] = self._sources[choice].progress(after[choice]) / self._sources[choice].weight
            picked[choice].append(record)
            num_records += 1
            num_bytes += _size(record.raw)
        return picked, after

    def _pack(self, picked: list[list[RawRecord]], number: int, counts: Counts) -> list[Row]:
        blocks: list[TokenBlock] = []
        places: list[str] = []
        for source, records in zip(self._sources, picked, strict=True):
            files = source.opened.files
            stop = self._data.bad_lines == "stop"
            block, found = tokenise(records, files, source.opened.format, source.opened.source.columns, self._encoder, stop)
            counts.add(found)
            blocks.append(block)
            places += [place_of(address, files) for address in block.addresses.tolist()]
        ids, trained, lengths, first, is_document = (
            np.concatenate([getattr(block, name) for block in blocks])
            for name in ("ids", "trained", "lengths", "first_trained", "is_document")
        )
        pieces = cut(lengths, first, is_document, self._data.seq_len, self._data.overlong, places.__getitem__)
        if not pieces.length.size:
            return []
        offsets = np.r_[0, np.cumsum(lengths, dtype=np.int64)]
        starts = offsets[pieces.sample] + pieces.start
        order = shuffled(pieces.length.size, self._seed, 4, number) if self._data.shuffle else np.arange(pieces.length.size)
        if self._data.packing == "packed":
            table = pack_rows(pieces.length, order, self._data.seq_len)
            row_order = shuffled(table.num_rows, self._seed, 5, number) if self._data.shuffle else np.arange(table.num_rows)
        else:
            if self._data.packing == "dynamic" and self._data.shuffle:
                order = group_by_length(pieces.length, order, self._group_size, 0, self._seed, 5, number)
            table, row_order = single_rows(order), np.arange(order.size)
        rows = []
        for row in row_order.tolist():
            members = table.samples[table.offsets[row] : table.offsets[row + 1]].tolist()
            spans = [slice(int(starts[m]), int(starts[m] + pieces.length[m])) for m in members]
            rows.append(Row([(ids[span], trained[span]) for span in spans], [places[int(pieces.sample[m])] for m in members]))
        counts.add(Counts(truncated=pieces.truncated, dropped=pieces.dropped, untrained=pieces.untrained))
        counts.samples += int(np.unique(pieces.sample).size)
        counts.pieces += int(pieces.length.size)
        counts.tokens += int(pieces.length.sum())
        counts.trained_tokens += sum(int(np.count_nonzero(mask[1:])) for row_ in rows for _, mask in row_.documents)
        return rows


def _size(raw: Any) -> int:
    """Bytes of a record, about."""
    if isinstance(raw, bytes):
        return len(raw)
    return sum(len(value) for value in raw.values() if isinstance(value, str)) if isinstance(raw, dict) else 0


def _not_seekable(file: DataFile, where: str) -> UserError:
    kind = file.compression or f".{file.kind}"
    return UserError(
        f"{where}.path",
        f"{file.path} cannot be streamed, because a run could not resume inside a {kind} file; "
        "convert it to .jsonl or .parquet, or set data.streaming: false",
        f"{file.path} 无法流式读取，因为 {kind} 文件不能从中间继续；请转换为 .jsonl 或 .parquet，或设 data.streaming: false",
    )

"""Tokenised sources on disk: written once, mapped into memory by every rank and every later run.

A store belongs to one source. Its name is a hash of what decides its content: the files, the format,
the tokenizer with its template, and which tokens are trained. Row length, packing, weights, seed and
overlong policy are not part of it, so changing them tokenises nothing again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from ascendfactory.core.messages import UserError, pick
from ascendfactory.core.recipe import Data, Pretrain, Sft, Source
from ascendfactory.engine.data.cache import build_once
from ascendfactory.engine.data.chat import Encoder
from ascendfactory.engine.data.counts import Counts
from ascendfactory.engine.data.formats import Format, detect_format
from ascendfactory.engine.data.pool import ordered_map
from ascendfactory.engine.data.records import DataFile, list_files, read_file
from ascendfactory.engine.data.tokenise import RawRecord, TokenBlock, place_of, tokenise

VERSION = 1
WHOLE_HASH_BYTES = 16 << 20
EDGE_BYTES = 1 << 20
CHUNK_RECORDS = 1024
CHUNK_BYTES = 1 << 20
MIN_BYTES_A_WORKER = 4 << 20
REPORT_S = 10.0
COLUMNS = ("lengths", "num_trained", "first_trained", "is_document", "keys", "addresses")


class TokenStore:
    """A tokenised source, read only. n = sequences, T = tokens."""

    def __init__(self, folder: Path, source: OpenedSource) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self.name = folder.name
        self.files = source.files
        self.format: Format = source.format
        self.counts = Counts(**meta["counts"])
        self.lengths, self.num_trained, self.first_trained, self.is_document, self.keys, self.addresses = (
            np.load(folder / f"{column}.npy", mmap_mode="r") for column in COLUMNS
        )
        self.offsets: NDArray[np.int64] = np.r_[0, np.cumsum(self.lengths, dtype=np.int64)]  # [n + 1]
        self._ids = _map(folder / "ids.bin", np.dtype(meta["dtype"]))
        self._bits = _map(folder / "trained.bin", np.dtype(np.uint8))

    def ids(self, start: int, length: int) -> NDArray[np.unsignedinteger | np.signedinteger]:
        """Token ids [length] from token `start` of the store on."""
        return self._ids[start : start + length]

    def trained(self, start: int, length: int) -> NDArray[np.bool_]:
        """Mask [length] of the same tokens."""
        bits = np.unpackbits(self._bits[start >> 3 : (start + length + 7) >> 3], bitorder="little")
        return bits[start & 7 : (start & 7) + length].view(bool)

    def place(self, sequence: int) -> str:
        """The record that a sequence came from (`file.jsonl:17`)."""
        return place_of(int(self.addresses[sequence]), self.files)


class OpenedSource:
    """A source with its files listed and its format found."""

    def __init__(self, source: Source, where: str) -> None:
        self.source, self.where = source, where
        self.files = list_files(source.path, f"{where}.path")
        self.format: Format = detect_format(source, self.files, where)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.num_bytes for file in self.files)


def open_sources(sources: Sequence[Source], key: Literal["train", "eval"]) -> list[OpenedSource]:
    """Lists and looks into the sources of `data.train` or `data.eval`.

    Raises:
        UserError: a path is missing, a folder is empty, a format is not known.
    """
    return [OpenedSource(source, f"data.{key}[{number}]") for number, source in enumerate(sources)]


def content_id(files: Sequence[DataFile]) -> str:
    """A hash of the files: their whole content up to 16 MiB each, else size, time of change, first and last MiB."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        stat = Path(file.path).stat()
        digest.update(f"{Path(file.path).name}\0{stat.st_size}\0".encode())
        with Path(file.path).open("rb") as stream:
            if stat.st_size <= WHOLE_HASH_BYTES:
                digest.update(stream.read())
                continue
            digest.update(str(stat.st_mtime_ns).encode() + stream.read(EDGE_BYTES))
            stream.seek(-EDGE_BYTES, os.SEEK_END)
            digest.update(stream.read())
    return digest.hexdigest()


def open_store(
    source: OpenedSource, data: Data, objective: Pretrain | Sft, tokenizer: PreTrainedTokenizerBase, tokenizer_id: str
) -> TokenStore:
    """The store of a source, tokenised now if it is not in the cache.

    Args:
        tokenizer_id: `fingerprint(tokenizer)`.

    Raises:
        UserError: a bad record where `data.bad_lines` is stop, or the cache folder cannot be written.
    """
    encoder = Encoder(tokenizer, objective)
    dtype = np.dtype(np.uint16) if len(tokenizer) <= 1 << 16 else np.dtype(np.int32)
    train_on = objective.train_on if isinstance(objective, Sft) else "all"
    facts = [VERSION, content_id(source.files), source.format, dict(sorted(source.source.columns.items())), tokenizer_id, train_on]
    name = "tokens-" + hashlib.blake2b(orjson.dumps(facts), digest_size=12).hexdigest()
    folder = build_once(Path(data.cache_dir).expanduser(), name, lambda new: _build(new, source, data, encoder, dtype), _is_whole)
    store = TokenStore(folder, source)
    if store.counts.bad and data.bad_lines == "stop":  # the cache was made by a run that skipped them
        place = store.counts.bad_places[0]
        raise UserError(
            "", f"{place}; set data.bad_lines: skip to go on without such records", f"{place}；如需跳过，请设 data.bad_lines: skip"
        )
    return store


def num_workers(data: Data, num_bytes: int) -> int:
    """Processes that tokenise: what the recipe says, else a core each, but none for less than 4 MiB."""
    if data.workers != "auto":
        return data.workers
    return max(1, min(len(os.sched_getaffinity(0)), num_bytes // MIN_BYTES_A_WORKER))


def chunks(files: Sequence[DataFile]) -> Iterator[list[RawRecord]]:
    """The records of a source in handy portions."""
    chunk: list[RawRecord] = []
    num_bytes = 0
    for number, file in enumerate(files):
        for raw, index, _ in read_file(file):
            chunk.append(RawRecord(raw, number, index))
            num_bytes += len(raw) if isinstance(raw, bytes) else 0
            if len(chunk) == CHUNK_RECORDS or num_bytes > CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _build(folder: Path, source: OpenedSource, data: Data, encoder: Encoder, dtype: np.dtype[Any]) -> None:
    def work(chunk: list[RawRecord]) -> tuple[TokenBlock, Counts]:
        return tokenise(chunk, source.files, source.format, source.source.columns, encoder, data.bad_lines == "stop")

    workers = num_workers(data, source.num_bytes)
    portions = chunks(source.files)
    results = map(work, portions) if workers == 1 else ordered_map(work, portions, workers)
    counts = Counts()
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
    began = reported = time.monotonic()
    with (folder / "ids.bin").open("wb") as ids, (folder / "trained.bin").open("wb") as trained:
        bits = _BitWriter(trained)
        for block, found in results:
            ids.write(block.ids.astype(dtype).tobytes())
            bits.write(block.trained)
            for name in COLUMNS:
                columns[name].append(getattr(block, name))
            counts.add(found)
            counts.samples += int(block.lengths.size)
            counts.tokens += int(block.ids.size)
            counts.trained_tokens += int(block.num_trained.sum())
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                _report(source.where, counts, reported - began)
        bits.close()
        for stream in (ids, trained):
            stream.flush()
            os.fsync(stream.fileno())
    for name, parts in columns.items():
        np.save(folder / f"{name}.npy", np.concatenate(parts) if parts else np.zeros(0, np.int64))
    (folder / "meta.json").write_text(json.dumps({"dtype": dtype.name, "counts": counts.as_dict()}, ensure_ascii=False))


def _report(where: str, counts: Counts, elapsed_s: float) -> None:
    speed = counts.records / elapsed_s
    en = f"{where}: tokenising, {counts.records:,} records so far, {speed:,.0f} a second"
    zh = f"{where}：正在分词，已处理 {counts.records:,} 条，每秒 {speed:,.0f} 条"
    print(pick(en, zh), file=sys.stderr, flush=True)


def _is_whole(folder: Path) -> bool:
    """Whether the sizes of all files agree; a crash of the machine can leave a short one."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        num_tokens = meta["counts"]["tokens"]
        lengths = np.load(folder / "lengths.npy", mmap_mode="r")
        return (
            int(lengths.sum()) == num_tokens
            and (folder / "ids.bin").stat().st_size == num_tokens * np.dtype(meta["dtype"]).itemsize
            and (folder / "trained.bin").stat().st_size == (num_tokens + 7) // 8
            and all((folder / f"{name}.npy").exists() for name in COLUMNS)
        )
    except (OSError, ValueError, KeyError):
        return False


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


class _BitWriter:
    """Writes booleans as bits, across the edges of portions."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._rest = np.zeros(0, bool)

    def write(self, flags: NDArray[np.bool_]) -> None:
        flags = np.concatenate([self._rest, flags])
        whole = flags.size & ~7
        self._stream.write(np.packbits(flags[:whole], bitorder="little").tobytes())
        self._rest = flags[whole:]

    def close(self) -> None:
        self._stream.write(np.packbits(self._rest, bitorder="little").tobytes())

"""Raw records out of files: what lies where, and how to go on from a position.

A record is handed on unparsed where it can be (a JSON line is bytes), so that worker processes
do the parsing. Its index is what a person counts: line numbers of text files, row numbers
of tables, both from 1.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from ascendfactory.core.messages import UserError, nearest
from ascendfactory.engine.data.counts import RecordError

Kind = Literal["jsonl", "json", "parquet", "csv", "text", "arrow"]
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".zst")
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
BATCH_ROWS = 1024


@dataclass(frozen=True)
class DataFile:
    """One file that holds records."""

    path: str
    kind: Kind
    compression: str = ""  # "", ".gz" or ".zst"

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return Path(self.path).stat().st_size

    @property
    def seekable(self) -> bool:
        """Whether reading can start at any record without reading what lies before it."""
        return not self.compression and self.kind in ("jsonl", "text", "parquet", "arrow")

    def place(self, index: int) -> str:
        """The name of a record, as a person finds it."""
        if self.kind == "text":
            return self.path
        return f"{self.path}:{index}" if self.kind in ("jsonl", "csv") else f"{self.path} row {index}"


@dataclass(frozen=True)
class Malformed:
    """Stands for a record that the file's own syntax has broken."""

    en: str
    zh: str


Raw = bytes | str | dict[str, Any] | Malformed
Item = tuple[Any, int, int]  # the raw record, its index, the offset after it


def list_files(path: str, where: str) -> list[DataFile]:
    """The files of a source, in the order of their names.

    Args:
        path: a file, or a folder that is searched to any depth; a folder of `datasets.save_to_disk` is known by its state.json.
        where: the recipe key of the source, for messages.

    Raises:
        UserError: the path does not exist, or holds nothing that can be read.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise _missing(root, where)
    if root.is_file():
        if file := _data_file(root):
            return [file]
        endings = " ".join(KINDS)
        raise UserError(
            where,
            f"{root} has an ending that is not known; use one of {endings} (.gz and .zst may follow the text ones)",
            f"无法识别 {root} 的扩展名；可用：{endings}（文本类可再加 .gz 或 .zst）",
        )
    if (root / "dataset_dict.json").exists():
        root = _train_split(root, where)
    if (root / "state.json").exists():
        names = [entry["filename"] for entry in json.loads((root / "state.json").read_text()).get("_data_files", [])]
        found = [_data_file(root / name) for name in names]
    else:
        paths = (p for p in sorted(root.rglob("*")) if not any(part.startswith(".") for part in p.relative_to(root).parts))
        found = [_data_file(p) for p in paths if p.is_file() and p.name not in NOT_DATA]
    files = [file for file in found if file]
    if not files:
        raise UserError(
            where,
            f"the folder {root} holds no data file; expected files that end in {' '.join(KINDS)}",
            f"文件夹 {root} 中没有数据文件；需要以 {' '.join(KINDS)} 结尾的文件",
        )
    return files


def _data_file(path: Path) -> DataFile | None:
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    name = path.name[: -len(compression)] if compression else path.name
    kind = KINDS.get(Path(name).suffix.lower())
    if kind is None or (compression and kind in ("parquet", "arrow")):
        return None
    return DataFile(str(path), kind, compression)


def _missing(root: Path, where: str) -> UserError:
    known = next(folder for folder in root.absolute().parents if folder.exists())
    wanted = root.absolute().relative_to(known).parts[0]
    near = nearest(wanted, [entry.name for entry in known.iterdir()]) if known.is_dir() else None
    hint_en = f"; did you mean {known / near}?" if near else f"; the folder {known} has no such name"
    hint_zh = f"；是否想写 {known / near}？" if near else f"；文件夹 {known} 中没有这个名字"
    return UserError(where, f"{root} does not exist{hint_en}", f"{root} 不存在{hint_zh}")


def _train_split(root: Path, where: str) -> Path:
    splits = json.loads((root / "dataset_dict.json").read_text()).get("splits", [])
    if "train" in splits:
        return root / "train"
    raise UserError(
        where,
        f"{root} holds the splits {', '.join(splits)} and none is named train; write the path of one, such as {root / splits[0]}",
        f"{root} 含有 {', '.join(splits)}，没有 train；请写其中一个的路径，例如 {root / splits[0]}",
    )


def read_file(file: DataFile, offset: int = 0, index: int = 0) -> Iterator[Item]:
    """Records of a file, from a position on.

    Args:
        offset: where to start: bytes for jsonl and text, rows for parquet and arrow; only 0 where the file is not seekable.
        index: lines (rows) that lie before it.

    Yields:
        (raw record, its index from 1, offset after it).

    Raises:
        UserError: the file as a whole cannot be read (damaged archive, not Parquet, broken JSON array).
    """
    readers = {"jsonl": _lines, "json": _json, "csv": _csv, "text": _text, "parquet": _parquet, "arrow": _arrow}
    try:
        yield from readers[file.kind](file, offset, index)
    except (pa.ArrowException, EOFError, gzip.BadGzipFile, OSError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(file.path, f"the file cannot be read: {reason}", f"无法读取该文件：{reason}") from error


def parse(raw: Raw, place: str) -> dict[str, Any]:
    """The record as a dictionary.

    Raises:
        RecordError: broken UTF-8, broken JSON, or something that is not an object.
    """
    if isinstance(raw, bytes):
        line = raw
        try:
            raw = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _broken_json(line, error, place) from None
    if isinstance(raw, Malformed):
        raise RecordError(place, raw.en, raw.zh)
    if not isinstance(raw, dict):
        kind = type(raw).__name__
        raise RecordError(
            place, f"a record must be an object with named fields, this one is a {kind}", f"记录应为带字段名的对象，这里是 {kind}"
        )
    return raw


def num_rows(file: DataFile) -> int:
    """Rows of a parquet or arrow file, from its headers."""
    if file.kind == "parquet":
        return int(pq.ParquetFile(file.path).metadata.num_rows)
    return sum(batch.num_rows for batch in _arrow_batches(file.path))


def _broken_json(raw: bytes, error: orjson.JSONDecodeError, place: str) -> RecordError:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as bad:
        return RecordError(
            place,
            f"byte {bad.start + 1} of the line is not UTF-8; save the file as UTF-8",
            f"该行第 {bad.start + 1} 个字节不是 UTF-8；请将文件存为 UTF-8",
        )
    return RecordError(place, f"broken JSON at column {error.colno}: {error.msg}", f"JSON 有误，第 {error.colno} 列：{error.msg}")


def _open(file: DataFile) -> IO[bytes]:
    if file.compression == ".gz":
        return gzip.open(file.path, "rb")  # type: ignore[return-value]
    if file.compression == ".zst":  # unlike the zstandard package, this one notices an archive that was cut off
        return io.BufferedReader(pa.input_stream(file.path, compression="zstd"), 1 << 20)
    return Path(file.path).open("rb")


def _lines(file: DataFile, offset: int, index: int) -> Iterator[Item]:
    with _open(file) as stream:
        if offset:
            stream.seek(offset)
        yield from _split_lines(stream, offset, index)


def _split_lines(stream: IO[bytes], offset: int, index: int) -> Iterator[Item]:
    for line in stream:
        index += 1
        offset += len(line)
        if index == 1 and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        if line.strip():
            yield line, index, offset


def _json(file: DataFile, offset: int, index: int) -> Iterator[Item]:
    """A JSON array, one object, or (common under this ending) an object a line."""
    with _open(file) as stream:
        data = stream.read().removeprefix(b"\xef\xbb\xbf")
    first = data.lstrip().split(b"\n", 1)[0]
    if first.startswith(b"{") and len(data.strip()) > len(first.rstrip()):
        try:
            orjson.loads(first)
        except orjson.JSONDecodeError:
            pass
        else:
            yield from ((parse_or_malformed(line), number, after) for line, number, after in _split_lines(io.BytesIO(data), 0, 0))
            return
    if not data.strip():
        return
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UserError(f"{file.path}:{error.lineno}", f"broken JSON: {error.msg}", f"JSON 有误：{error.msg}") from None
    for number, record in enumerate(value if isinstance(value, list) else [value], 1):
        yield record, number, number


def parse_or_malformed(line: bytes) -> Raw:
    """A JSON line, parsed; what is wrong with it where it cannot be."""
    try:
        return parse(line, "")
    except RecordError as bad:
        return Malformed(bad.en, bad.zh)


def _csv(file: DataFile, offset: int, index: int) -> Iterator[Item]:
    csv.field_size_limit(1 << 30)
    with io.TextIOWrapper(_open(file), encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, delimiter="\t" if ".tsv" in file.path.lower()[-8:] else ",")
        header = next(reader, [])
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                yield Malformed(f"broken CSV: {error}", f"CSV 有误：{error}"), line, line
                continue
            if cells is None:
                return
            if cells:
                yield _csv_record(header, cells), line, line


def _csv_record(header: list[str], cells: list[str]) -> Raw:
    if len(cells) != len(header):
        return Malformed(
            f"{len(cells)} cells where the first line names {len(header)} columns (a comma or quote is missing or too many)",
            f"该行有 {len(cells)} 格，而首行有 {len(header)} 列（多或少了逗号、引号）",
        )
    if any("\udc80" <= char <= "\udcff" for cell in cells for char in cell if char > "\ud7ff"):
        return Malformed("the line is not UTF-8; save the file as UTF-8", "该行不是 UTF-8；请将文件存为 UTF-8")
    return dict(zip(header, cells, strict=True))


def _text(file: DataFile, offset: int, index: int) -> Iterator[Item]:
    """The whole file is one document."""
    if offset:
        return
    with _open(file) as stream:
        data = stream.read()
    size = max(len(data), 1)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield Malformed(f"line {line} is not UTF-8; save the file as UTF-8", f"第 {line} 行不是 UTF-8；请将文件存为 UTF-8"), 1, size
        return
    if text.strip():
        yield {"text": text}, 1, size


def _parquet(file: DataFile, offset: int, index: int) -> Iterator[Item]:
    with pq.ParquetFile(file.path, memory_map=True) as table:
        first = 0
        for group in range(table.num_row_groups):
            end = first + table.metadata.row_group(group).num_rows
            if end > offset:
                yield from _table_rows(table.iter_batches(batch_size=BATCH_ROWS, row_groups=[group]), first, offset)
            first = end


def _arrow(file: DataFile, offset: int, index: int) -> Iterator[Item]:
    yield from _table_rows(_arrow_batches(file.path), 0, offset)


def _arrow_batches(path: str) -> Iterator[Any]:
    """Record batches of an IPC file or stream; the map makes those that are skipped free."""
    with pa.memory_map(path) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)
            return
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


def _table_rows(batches: Iterator[Any], first: int, offset: int) -> Iterator[Item]:
    for batch in batches:
        skip = min(max(offset - first, 0), batch.num_rows)
        first += skip
        for start in range(skip, batch.num_rows, BATCH_ROWS):
            for record in batch.slice(start, BATCH_ROWS).to_pylist():
                first += 1
                yield record, first, first


def first_records(files: list[DataFile], count: int) -> list[Item]:
    """The first `count` records of a source."""
    return list(itertools.islice(itertools.chain.from_iterable(read_file(file) for file in files), count))

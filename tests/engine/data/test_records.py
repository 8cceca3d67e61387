"""Files of every kind give the same records, and what is wrong with one is said with its place."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.engine.data.counts import RecordError
from ascendfactory.engine.data.records import list_files, num_rows, parse, read_file
from tests.engine.data.conftest import alpaca, write_jsonl

RECORDS = [{**record, "note": '你好, "x"\nnew line'} for record in alpaca(2500)]


def records_of(path: Path) -> list[dict]:
    return [parse(raw, file.place(index)) for file in list_files(str(path), "data.train[0].path") for raw, index, _ in read_file(file)]


def jsonl_bytes() -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write_csv(path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, RECORDS[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(RECORDS)


def write_arrow(path: Path, *, stream: bool) -> None:
    table = pa.Table.from_pylist(RECORDS)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=700)


WRITERS = {
    "a.jsonl": lambda p: p.write_bytes(jsonl_bytes()),
    "bom.jsonl": lambda p: p.write_bytes(b"\xef\xbb\xbf" + jsonl_bytes()),
    "lines.json": lambda p: p.write_bytes(jsonl_bytes()),
    "array.json": lambda p: p.write_text(json.dumps(RECORDS, indent=1)),
    "a.jsonl.gz": lambda p: p.write_bytes(gzip.compress(jsonl_bytes())),
    "a.jsonl.zst": lambda p: p.write_bytes(zst(jsonl_bytes()[:1000]) + zst(jsonl_bytes()[1000:])),
    "array.json.gz": lambda p: p.write_bytes(gzip.compress(json.dumps(RECORDS).encode())),
    "a.csv": write_csv,
    "a.tsv": write_csv,
    "a.parquet": lambda p: pq.write_table(pa.Table.from_pylist(RECORDS), p, row_group_size=900),
    "file.arrow": lambda p: write_arrow(p, stream=False),
    "stream.arrow": lambda p: write_arrow(p, stream=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_round_trip(tmp_path, name) -> None:
    WRITERS[name](tmp_path / name)
    assert records_of(tmp_path / name) == RECORDS


@pytest.mark.parametrize("name", ["a.jsonl", "bom.jsonl", "a.parquet", "file.arrow", "stream.arrow"])
def test_reading_goes_on_from_any_position(tmp_path, name) -> None:
    WRITERS[name](tmp_path / name)
    (file,) = list_files(str(tmp_path / name), "")
    assert file.seekable
    items = list(read_file(file))
    for at in (0, 699, 700, 900, 2498):
        _, index, offset = items[at]
        assert list(read_file(file, offset, index)) == items[at + 1 :]
    if name.endswith(("parquet", "arrow")):
        assert num_rows(file) == len(RECORDS)


def test_one_object_and_text_files(tmp_path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(RECORDS[0], indent=2))
    assert records_of(tmp_path / "one.json") == RECORDS[:1]
    (tmp_path / "prose.txt").write_text("One line.\n\nAnother one.\n")
    (tmp_path / "empty.txt").write_text("\n")
    assert records_of(tmp_path / "prose.txt") == [{"text": "One line.\n\nAnother one.\n"}]
    assert records_of(tmp_path / "empty.txt") == []


def test_folders(tmp_path) -> None:
    (tmp_path / "set" / "deeper").mkdir(parents=True)
    write_jsonl(tmp_path / "set" / "b.jsonl", RECORDS[2:4])
    write_jsonl(tmp_path / "set" / "a.jsonl", RECORDS[:2])
    write_jsonl(tmp_path / "set" / "deeper" / "c.jsonl", RECORDS[4:6])
    (tmp_path / "set" / "README.md").write_text("not data")
    (tmp_path / "set" / ".hidden.jsonl").write_text("not json")
    assert records_of(tmp_path / "set") == RECORDS[:6]


def test_a_folder_of_save_to_disk(tmp_path) -> None:
    root = tmp_path / "saved"
    (root / "train").mkdir(parents=True)
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    write_arrow(root / "train" / "data-00000-of-00001.arrow", stream=True)
    write_arrow(root / "train" / "cache-1234.arrow", stream=True)
    (root / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (root / "train" / "dataset_info.json").write_text("{}")
    assert records_of(root) == RECORDS
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "validation"]}))
    with pytest.raises(UserError, match="test, validation"):
        list_files(str(root), "")


def test_missing_paths_name_the_nearest(tmp_path) -> None:
    write_jsonl(tmp_path / "train_data.jsonl", RECORDS[:1])
    with pytest.raises(UserError, match=r"data\.train\[0\]\.path: .* does not exist; did you mean .*train_data\.jsonl\?"):
        list_files(str(tmp_path / "train_dta.jsonl"), "data.train[0].path")
    with pytest.raises(UserError, match="ending that is not known"):
        (tmp_path / "x.docx").write_text("")
        list_files(str(tmp_path / "x.docx"), "")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="holds no data file"):
        list_files(str(tmp_path / "nothing"), "")


def errors_of(path: Path) -> list[RecordError]:
    found = []
    for file in list_files(str(path), ""):
        for raw, index, _ in read_file(file):
            try:
                parse(raw, file.place(index))
            except RecordError as error:
                found.append(error)
    return found


def test_bad_lines_are_named_by_file_and_line(tmp_path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "ok"}\n\n{"text": oops}\n{"text": "\xff"}\n["list"]\n{"text": "cut')
    found = errors_of(path)
    assert [error.where for error in found] == [f"{path}:{line}" for line in (3, 4, 5, 6)]
    for error, words in zip(found, ("broken JSON", "byte 11 of the line is not UTF-8", "a list", "broken JSON"), strict=True):
        assert words in error.en and error.zh and error.zh != error.en


def test_bad_csv_lines(tmp_path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b'text,id\n"two\nlines",1\nonly one\nbad \xff,3\nfine,4\n')
    found = errors_of(path)
    assert [error.where for error in found] == [f"{path}:4", f"{path}:5"]
    assert "1 cells" in found[0].en and "UTF-8" in found[1].en


def test_bad_text_and_bad_arrays(tmp_path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"fine\nfine\nb\xe9d\n")
    (error,) = errors_of(tmp_path / "bad.txt")
    assert "line 3" in error.en
    (tmp_path / "bad.json").write_text('[{"a": 1},\n {"a": }]')
    with pytest.raises(UserError, match=r"bad\.json:2: broken JSON"):
        errors_of(tmp_path / "bad.json")


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "a.jsonl.gz", "a.jsonl.zst"])
def test_damaged_files_are_named(tmp_path, name) -> None:
    WRITERS[name](tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cannot be read") as caught:
        records_of(tmp_path / name)
    assert caught.value.where == str(tmp_path / name)

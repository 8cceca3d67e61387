"""The token cache: what it holds, when it is used again, and that it appears whole or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal

import numpy as np
import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Sft
from ascendfactory.engine.data import store as store_module
from ascendfactory.engine.data.chat import Encoder
from ascendfactory.engine.data.formats import to_sample
from ascendfactory.engine.data.pool import ordered_map
from ascendfactory.engine.data.store import OpenedSource, TokenStore, open_store
from ascendfactory.engine.data.tokenizer import fingerprint
from tests.engine.data import templates
from tests.engine.data.conftest import alpaca, recipe, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer(templates.CHATML)


def opened(tmp_path, train, tokenizer, objective=None, **data) -> TokenStore:
    made = recipe(tmp_path, train, **data)
    source = OpenedSource(made.data.train[0], "data.train[0]")
    return open_store(source, made.data, objective or Sft(), tokenizer, fingerprint(tokenizer))


def test_it_holds_what_the_encoder_gives(tmp_path, tokenizer) -> None:
    records = alpaca(50)
    store = opened(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", records)), tokenizer)
    samples = [to_sample(record, "alpaca", {}, "") for record in records]
    expected = [encoded for (encoded,) in Encoder(tokenizer, Sft()).encode_many(samples, [""] * 50)]
    assert store.lengths.size == 50 and store.counts.samples == 50
    for number, encoded in enumerate(expected):
        start, length = int(store.offsets[number]), int(store.lengths[number])
        assert (store.ids(start, length) == encoded.ids).all()
        assert (store.trained(start, length) == encoded.trained).all()
        assert store.num_trained[number] == encoded.trained.sum() and store.first_trained[number] == encoded.trained.argmax()
        assert store.place(number) == f"{tmp_path}/a.jsonl:{number + 1}"
    assert store.counts.tokens == sum(e.ids.size for e in expected)
    assert store.counts.trained_tokens == sum(int(e.trained.sum()) for e in expected)


def test_workers_give_the_same_bytes(tmp_path, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "CHUNK_RECORDS", 7)
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(100)))
    alone = opened(tmp_path, path, tokenizer, workers=1, cache_dir=str(tmp_path / "one"))
    together = opened(tmp_path, path, tokenizer, workers=3, cache_dir=str(tmp_path / "three"))
    assert alone.name == together.name
    for name in ("ids.bin", "trained.bin", "lengths.npy", "addresses.npy", "meta.json"):
        assert (tmp_path / "one" / alone.name / name).read_bytes() == (tmp_path / "three" / alone.name / name).read_bytes()


def test_the_name_depends_on_what_decides_the_content(tmp_path, tokenizer, make_tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", alpaca(5))
    first = opened(tmp_path, str(path), tokenizer).name
    assert opened(tmp_path, str(path), tokenizer, seq_len=32, packing="dynamic", overlong="drop", bad_lines="skip").name == first
    os.utime(path, (1, 1))
    copy = tmp_path / "elsewhere" / "a.jsonl"
    copy.parent.mkdir()
    copy.write_bytes(path.read_bytes())
    assert opened(tmp_path, str(copy), tokenizer).name == first  # content counts, not place or time
    others = [
        opened(tmp_path, str(path), tokenizer, objective=Sft(train_on="last")).name,
        opened(tmp_path, str(path), make_tokenizer(templates.GEMMA, eos="<end_of_turn>", bos="<|begin_of_text|>")).name,
        opened(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", alpaca(6))), tokenizer).name,
    ]
    assert len({first, *others}) == 4


def test_a_warm_start_reads_no_record(tmp_path, tokenizer, monkeypatch) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(20)))
    opened(tmp_path, path, tokenizer)
    monkeypatch.setattr(store_module, "tokenise", lambda *a: pytest.fail("tokenised again"))
    opened(tmp_path, path, tokenizer)


def test_a_short_file_is_built_anew(tmp_path, tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(20)))
    store = opened(tmp_path, path, tokenizer)
    ids = tmp_path / "cache" / store.name / "ids.bin"
    whole = ids.read_bytes()
    ids.write_bytes(whole[:-2])
    opened(tmp_path, path, tokenizer)
    assert ids.read_bytes() == whole


BAD = '{"instruction": "q", "output": "a"}\n{"instruction": "q"\n{"instruction": "q", "output": ""}\n{"instruction": "q", "output": "b"}\n'


def test_bad_lines_stop_or_are_counted(tmp_path, tokenizer) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(BAD)
    with pytest.raises(UserError, match=r"bad\.jsonl:2: broken JSON"):
        opened(tmp_path, str(path), tokenizer)
    assert not [entry for entry in (tmp_path / "cache").iterdir() if entry.is_dir()]  # nothing half made stays
    store = opened(tmp_path, str(path), tokenizer, bad_lines="skip")
    assert (store.counts.records, store.counts.samples, store.counts.bad) == (4, 2, 2)
    assert [place.split(": ")[0] for place in store.counts.bad_places] == [f"{path}:2", f"{path}:3"]
    with pytest.raises(UserError, match=r"bad\.jsonl:2"):  # the cache made by `skip` does not hide them from `stop`
        opened(tmp_path, str(path), tokenizer)
    with pytest.raises(UserError, match=r"bad\.jsonl:2"):  # an error crosses from a worker process
        opened(tmp_path, str(path), tokenizer, workers=2, cache_dir=str(tmp_path / "other"))


def test_a_sample_without_a_trained_token_is_counted(tmp_path, make_tokenizer) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "<|endoftext|>"}, {"text": "fox"}])
    store = opened(tmp_path, str(path), make_tokenizer(None, eos="<|endoftext|>"))
    assert (store.counts.untrained, store.counts.samples) == (1, 1)


def test_large_vocabularies_take_four_bytes(tmp_path, tokenizer, monkeypatch) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(3)))
    small = opened(tmp_path, path, tokenizer)
    monkeypatch.setattr(type(tokenizer), "__len__", lambda self: 70_000)
    large = opened(tmp_path, path, tokenizer, cache_dir=str(tmp_path / "large"))
    assert (small.ids(0, 9).dtype, large.ids(0, 9).dtype) == (np.uint16, np.int32)
    assert small.ids(0, 99).tolist() == large.ids(0, 99).tolist()


def _open_and_count(tmp_path, path, tokenizer, queue) -> None:
    original = store_module.tokenise
    calls = []

    def counting(*arguments):
        calls.append(1)
        return original(*arguments)

    store_module.tokenise = counting
    store = opened(tmp_path, path, tokenizer)
    queue.put((len(calls), int(store.lengths.sum())))


def test_processes_that_start_together_tokenise_once(tmp_path, tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(200)))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_open_and_count, args=(tmp_path, path, tokenizer, queue)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(calls for calls, _ in found) == [0, 0, 0, 1]
    assert len({total for _, total in found}) == 1


def test_what_a_killed_process_left_is_cleared(tmp_path, tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(5)))
    name = opened(tmp_path / "x", path, tokenizer, cache_dir=str(tmp_path / "x")).name
    left = tmp_path / "cache" / f"{name}.building"
    left.mkdir(parents=True)
    (left / "ids.bin").write_bytes(b"rubbish")
    assert opened(tmp_path, path, tokenizer).counts.samples == 5
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, tokenizer) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir: cannot write"):
        opened(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", alpaca(2))), tokenizer, cache_dir=str(tmp_path / "file" / "cache"))


def test_the_pool_keeps_order_and_names_a_killed_worker() -> None:
    assert list(ordered_map(lambda n: n * n, range(20), 3)) == [n * n for n in range(20)]
    assert list(ordered_map(lambda n: n, [], 2)) == []

    def killed(number: int) -> int:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(UserError, match=r"data\.workers: .* code -9"):
        list(ordered_map(killed, range(20), 2))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(ordered_map(lambda n: 1 // n, range(3), 2))


def test_meta_is_plain_json(tmp_path, tokenizer) -> None:
    store = opened(tmp_path, str(write_jsonl(tmp_path / "a.jsonl", alpaca(5))), tokenizer)
    meta = json.loads((tmp_path / "cache" / store.name / "meta.json").read_text())
    assert meta["dtype"] == "uint16" and meta["counts"]["records"] == 5

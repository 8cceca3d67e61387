"""The loader, over tables and streams: what a step holds, whoever computes it, and how a run goes on."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ascendfactory.core.messages import UserError
from ascendfactory.core.recipe import Duration
from ascendfactory.engine.data import stream as stream_module
from ascendfactory.engine.data.loader import Loader, open_data
from tests.engine.data import templates
from tests.engine.data.conftest import alpaca, recipe, write_jsonl

MODES = {
    "packed": {"packing": "packed"},
    "dynamic": {"packing": "dynamic"},
    "fixed": {"packing": "fixed"},
    "in order": {"packing": "packed", "shuffle": False},
    "stream": {"packing": "packed", "streaming": True},
    "dynamic stream": {"packing": "dynamic", "streaming": True},
}


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer):
    return make_tokenizer(templates.CHATML, pad="<|im_end|>")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(stream_module, "WINDOW_RECORDS", 25)


@pytest.fixture
def path(tmp_path) -> str:
    return str(write_jsonl(tmp_path / "a.jsonl", alpaca(100)))


def documents(batch) -> list[tuple[int, ...]]:
    """The documents of a micro-batch, in no order."""
    found = []
    for row, lengths in zip(batch.input_ids_BS.tolist(), batch.lengths, strict=True):
        start = 0
        for length in lengths:
            found.append(tuple(row[start : start + length]))
            start += length
    return found


def same(left, right) -> bool:
    tensors = ("input_ids_BS", "labels_BS", "positions_BS", "documents_BS")
    return left.lengths == right.lengths and all(torch.equal(getattr(left, name), getattr(right, name)) for name in tensors)


def open_(tmp_path, path, tokenizer, mode, **sizes) -> Loader:
    data = dict(MODES[mode])
    extra = {
        name: sizes.pop(name)
        for name in ("eval_fraction", "eval", "seed", "duration", "seq_len", "objective", "overlong", "cache_dir")
        if name in sizes
    }
    return open_data(recipe(tmp_path, path, seq_len=extra.pop("seq_len", 96), **data, **extra), tokenizer, **sizes)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_holds_the_same_samples_whatever_the_ranks_and_micro_batches(tmp_path, path, tokenizer, mode) -> None:
    steps = []
    for dp_size, micro_size, num_micro in ((1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8), (8, 1, 1)):
        ranks = [
            open_(tmp_path, path, tokenizer, mode, dp_rank=rank, dp_size=dp_size, micro_size=micro_size, num_micro=num_micro)
            for rank in range(dp_size)
        ]
        batches = [[batch for rank in ranks for batch in rank.next_step()] for _ in range(12)]
        assert all(batch.input_ids_BS.shape[0] == micro_size for step in batches for batch in step)
        steps.append([Counter(doc for batch in step for doc in documents(batch)) for step in batches])
        assert len({rank.fingerprint for rank in ranks}) == 1
    assert all(other == steps[0] for other in steps[1:])
    assert len({frozenset(step) for step in steps[0]}) > 1


@pytest.mark.parametrize("mode", MODES)
def test_n_plus_m_steps_equal_n_stop_m(tmp_path, path, tokenizer, mode) -> None:
    whole = open_(tmp_path, path, tokenizer, mode, micro_size=4, duration="100 steps")
    expected = [whole.next_step()[0] for _ in range(60)]
    for stop in (0, 1, 7, 31, 52):
        first = open_(tmp_path, path, tokenizer, mode, micro_size=4, duration="100 steps")
        for _ in range(stop):
            first.next_step()
        state = json.loads(json.dumps(first.state_dict()))
        assert len(json.dumps(state)) < 400
        resumed = open_(tmp_path, path, tokenizer, mode, micro_size=4, duration="100 steps")
        resumed.load_state_dict(state)
        assert all(same(resumed.next_step()[0], batch) for batch in expected[stop:])
        assert resumed.epoch == whole.epoch


@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed", "in order"])
def test_an_epoch_sees_every_sample_once_and_the_last_step_is_filled_up(tmp_path, path, tokenizer, mode) -> None:
    loader = open_(tmp_path, path, tokenizer, mode, micro_size=4, num_micro=4, duration="2 epochs")
    num_rows = loader.counts.rows
    assert 2 * num_rows % 16  # the last step is not full
    steps = loader.num_steps(Duration(amount=2, unit="epochs"))
    assert steps == -(-2 * num_rows // 16)
    seen = Counter(doc for _ in range(steps) for batch in loader.next_step() for doc in documents(batch))
    assert len(seen) == 100 and set(seen.values()) == {2}
    assert loader.epoch == 2
    beyond = loader.next_step()
    assert all((batch.labels_BS == -100).all() and batch.lengths == [[]] * 4 and (batch.documents_BS == -1).all() for batch in beyond)


@pytest.mark.parametrize("mode", ["packed", "dynamic", "fixed"])
def test_epochs_differ_and_seeds_differ(tmp_path, path, tokenizer, mode) -> None:
    def epoch(loader) -> list:
        return [documents(loader.next_step()[0]) for _ in range(loader.counts.rows)]

    loader = open_(tmp_path, path, tokenizer, mode, duration="2 epochs")
    first, second = epoch(loader), epoch(loader)
    assert first != second and sorted(first) == sorted(second)
    assert epoch(open_(tmp_path, path, tokenizer, mode, seed=7)) != first


def test_in_order_keeps_the_order_of_the_file(tmp_path, path, tokenizer) -> None:
    data = recipe(tmp_path, path, packing="dynamic", shuffle=False, seq_len=96)
    loader = open_data(data, tokenizer)
    for number in range(100):
        loader.next_step()
        assert loader.describe_last_step() == f"{path}:{number + 1}"


def test_tensors_of_a_packed_row(tmp_path, tokenizer) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "The fox", "completion": " jumps"}, {"prompt": "Paris", "completion": " is"}])
    loader = open_data(recipe(tmp_path, str(path), shuffle=False), tokenizer)
    (batch,) = loader.next_step()
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in ("The fox jumps", "Paris is")]
    ids.sort(key=len, reverse=True)
    lengths = [len(one) for one in ids]
    width = -(-sum(lengths) // 8) * 8
    pad = width - sum(lengths)
    assert batch.lengths == [lengths]
    assert batch.input_ids_BS.tolist() == [ids[0] + ids[1] + [tokenizer.pad_token_id] * pad]
    assert batch.positions_BS.tolist() == [[*range(lengths[0]), *range(lengths[1]), *range(pad)]]
    assert batch.documents_BS.tolist() == [[0] * lengths[0] + [1] * lengths[1] + [-1] * pad]
    assert [t.dtype for t in (batch.input_ids_BS, batch.labels_BS, batch.positions_BS, batch.documents_BS)] == [torch.int64] * 3 + [
        torch.int32
    ]
    expected = []
    for one in ids:
        prompt = len(tokenizer("The fox" if tokenizer.decode(one).startswith("The") else "Paris")["input_ids"])
        expected += [one[t + 1] if t + 1 >= prompt else -100 for t in range(len(one) - 1)] + [-100]
    assert batch.labels_BS.tolist() == [expected + [-100] * pad]
    assert tokenizer.eos_token_id in batch.labels_BS[0].tolist()  # pad = EOS, and the EOS that ends an answer is trained


@pytest.mark.parametrize("mode", MODES)
def test_labels_are_the_next_token_of_the_same_document(tmp_path, path, tokenizer, mode) -> None:
    loader = open_(tmp_path, path, tokenizer, mode, micro_size=4)
    trained = tokens = 0
    for _ in range(10):
        (batch,) = loader.next_step()
        ids, labels, docs, positions = (getattr(batch, n).numpy() for n in ("input_ids_BS", "labels_BS", "documents_BS", "positions_BS"))
        has_label = labels != -100
        assert not has_label[:, -1].any()
        rows, columns = np.nonzero(has_label)
        assert (labels[rows, columns] == ids[rows, columns + 1]).all()
        assert (docs[rows, columns] == docs[rows, columns + 1]).all() and (docs[rows, columns] >= 0).all()
        assert (positions[rows, columns] + 1 == positions[rows, columns + 1]).all()
        assert [[int((row == d).sum()) for d in range(row.max() + 1)] for row in docs] == batch.lengths
        width = ids.shape[1]
        longest = max(map(sum, batch.lengths))
        assert width == (96 if mode == "fixed" else -(-longest // 8) * 8)
        trained, tokens = trained + int(has_label.sum()), tokens + sum(map(sum, batch.lengths))
    assert 0 < trained < tokens


def test_counts_are_those_of_the_batches(tmp_path, tokenizer) -> None:
    records = [*alpaca(60), {"instruction": "x " * 300, "output": "never seen"}]
    path = str(write_jsonl(tmp_path / "a.jsonl", records))
    for mode in ("packed", "dynamic"):
        loader = open_(tmp_path, path, tokenizer, mode, seq_len=64, duration="1 epochs")
        counts = loader.counts
        steps = [loader.next_step()[0] for _ in range(loader.num_steps(Duration(amount=1, unit="epochs")))]
        assert counts.tokens == sum(sum(map(sum, batch.lengths)) for batch in steps)
        assert counts.trained_tokens == sum(int((batch.labels_BS >= 0).sum()) for batch in steps)
        assert counts.samples == sum(len(row) for batch in steps for row in batch.lengths)
        assert counts.untrained == 61 - counts.samples > 1 and counts.truncated > 5 and counts.records == 61


def test_documents_are_cut_into_pieces_that_lose_nothing(tmp_path, tokenizer) -> None:
    text = " ".join(f"word{n}" for n in range(400))
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": text}])
    loader = open_data(recipe(tmp_path, str(path), objective="pretrain", packing="dynamic", shuffle=False, seq_len=40), tokenizer)
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    got = [doc for _ in range(loader.counts.rows) for doc in documents(loader.next_step()[0])]
    assert [token for doc in got for token in doc] == ids
    assert loader.counts.trained_tokens == len(ids) - len(got)


def test_weights_repeat_and_subsample(tmp_path, tokenizer) -> None:
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", alpaca(40, start=100 * n))) for n in range(3)]
    sources = [{"path": paths[0], "weight": 2.5}, {"path": paths[1], "weight": 0.25}, paths[2]]
    loader = open_data(recipe(tmp_path, sources, packing="dynamic", seq_len=128, duration="1 epochs"), tokenizer)
    places = Counter()
    for _ in range(loader.counts.rows):
        loader.next_step()
        places[loader.describe_last_step()] += 1
    by_source = [Counter(v for k, v in places.items() if k.startswith(path)) for path in paths]
    assert by_source == [{2: 20, 3: 20}, {1: 10}, {1: 40}]


def test_stream_weights(tmp_path, tokenizer) -> None:
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", alpaca(size, start=1000 * n))) for n, size in enumerate((30, 60))]
    sources = [{"path": paths[0], "weight": 3.0}, paths[1]]
    loader = open_data(recipe(tmp_path, sources, packing="dynamic", streaming=True, seq_len=128), tokenizer)
    places = Counter()
    for _ in range(150):  # one epoch: 3 x 30 + 60
        loader.next_step()
        places[loader.describe_last_step()] += 1
    shares = [sum(v for k, v in places.items() if k.startswith(path)) for path in paths]
    assert abs(shares[0] - 90) <= 2 and abs(shares[1] - 60) <= 2
    assert loader.epoch == pytest.approx(1.0, abs=0.05)


def test_held_out_samples_are_not_trained_and_every_rank_evaluates_as_often(tmp_path, path, tokenizer) -> None:
    ranks = [
        open_(tmp_path, path, tokenizer, "packed", eval_fraction=0.3, dp_rank=r, dp_size=3, micro_size=2, duration="1 epochs")
        for r in range(3)
    ]
    evaluated = [list(rank.eval_batches()) for rank in ranks]
    assert all(rank.has_eval for rank in ranks) and len({len(batches) for batches in evaluated}) == 1
    held_out = Counter(doc for batches in evaluated for batch in batches for doc in documents(batch))
    alone = open_(tmp_path, path, tokenizer, "packed", eval_fraction=0.3, micro_size=6, duration="1 epochs")
    assert Counter(doc for batch in alone.eval_batches() for doc in documents(batch)) == held_out
    assert Counter(doc for batch in alone.eval_batches() for doc in documents(batch)) == held_out  # a second time the same
    steps = alone.num_steps(Duration(amount=1, unit="epochs"))
    trained = Counter(doc for _ in range(steps) for batch in alone.next_step() for doc in documents(batch))
    assert not trained.keys() & held_out.keys()
    assert len(trained) + len(held_out) == 100 and set(held_out.values()) == {1} and 15 < len(held_out) < 45
    assert alone.counts.held_out == len(held_out)


def test_eval_files(tmp_path, path, tokenizer) -> None:
    held_out = str(write_jsonl(tmp_path / "e.jsonl", alpaca(7, start=500)))
    for mode in ("packed", "stream"):
        loader = open_(tmp_path, path, tokenizer, mode, eval=held_out, micro_size=2)
        assert sum(len(row) for batch in loader.eval_batches() for row in batch.lengths) == 7
    assert not open_(tmp_path, path, tokenizer, "packed").has_eval


def test_durations(tmp_path, path, tokenizer) -> None:
    loader = open_(tmp_path, path, tokenizer, "packed", micro_size=4)
    assert loader.num_steps(Duration(amount=17, unit="steps")) == 17
    per_step = loader.counts.tokens / loader.counts.rows * 4
    assert loader.num_steps(Duration(amount=20_000, unit="tokens")) == -(-20_000 // per_step)
    assert loader.num_steps(Duration(amount=0.5, unit="epochs")) == math.ceil(math.ceil(loader.counts.rows / 2) / 4)
    stream = open_(tmp_path, path, tokenizer, "stream", micro_size=4)
    assert stream.num_steps(Duration(amount=20_000, unit="tokens")) > 0
    with pytest.raises(UserError, match="duration: a stream has no known end"):
        stream.num_steps(Duration(amount=1, unit="epochs"))


def test_resuming_costs_the_same_wherever_the_run_was(tmp_path, tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", alpaca(400)))
    costs = []
    for steps in (1, 20, 90):
        first = open_(tmp_path, path, tokenizer, "stream", micro_size=4)
        for _ in range(steps):
            first.next_step()
        resumed = open_(tmp_path, path, tokenizer, "stream", micro_size=4)
        resumed.load_state_dict(first.state_dict())
        assert same(resumed.next_step()[0], first.next_step()[0])
        resumed._rows._wait()
        costs.append(resumed._rows.records_read)
    assert max(costs) <= 4 * 25  # at most the windows that the step lies in, and the one read ahead


@pytest.mark.parametrize("kind", ["parquet", "file.arrow", "stream.arrow", "folder"])
def test_streams_of_tables_resume(tmp_path, tokenizer, kind, monkeypatch) -> None:
    monkeypatch.setattr(stream_module, "WINDOW_RECORDS", 30)
    table = pa.Table.from_pylist(alpaca(90))
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=20)
    elif kind == "folder":
        path.mkdir()
        pq.write_table(table.slice(0, 30), path / "1.parquet")
        write_jsonl(path / "2.jsonl", alpaca(30, start=30))
        write_jsonl(path / "3.jsonl", alpaca(30, start=60))
    else:
        with (pa.ipc.new_stream if "stream" in kind else pa.ipc.new_file)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    whole = open_(tmp_path, str(path), tokenizer, "dynamic stream", micro_size=3)
    seen = Counter()
    states = []
    batches = []
    for _ in range(60):
        states.append(whole.state_dict())
        batches.append(whole.next_step()[0])
        seen.update(documents(batches[-1]))
    assert len(seen) == 90 and set(seen.values()) == {2}  # 180 rows are two passes
    for stop in (5, 17, 40):
        resumed = open_(tmp_path, str(path), tokenizer, "dynamic stream", micro_size=3)
        resumed.load_state_dict(states[stop])
        assert all(same(resumed.next_step()[0], batch) for batch in batches[stop:])


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv", "a.json"])
def test_streams_refuse_what_cannot_seek(tmp_path, tokenizer, name) -> None:
    import gzip

    content = b"instruction,output\nq,a\n" if name == "a.csv" else b'{"instruction": "q", "output": "a"}'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError, match="cannot be streamed"):
        open_(tmp_path, str(tmp_path / name), tokenizer, "stream")


def test_streams_refuse_a_share_held_out(tmp_path, path, tokenizer) -> None:
    with pytest.raises(UserError, match=r"data\.eval_fraction"):
        open_(tmp_path, path, tokenizer, "stream", eval_fraction=0.1)


def test_stream_errors_reach_the_step(tmp_path, tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", alpaca(60))
    path.write_text(path.read_text() + "{broken\n")
    loader = open_(tmp_path, str(path), tokenizer, "stream")
    for _ in range(20):
        loader.next_step()
    resumed = open_(tmp_path, str(path), tokenizer, "stream")
    resumed.load_state_dict(loader.state_dict())  # line numbers are right after a resume, too
    for run in (loader, resumed):
        with pytest.raises(UserError, match=r"a\.jsonl:61: broken JSON"):
            for _ in range(100):
                run.next_step()


@pytest.mark.parametrize("mode", ["packed", "stream"])
def test_a_loader_goes_back(tmp_path, path, tokenizer, mode) -> None:
    loader = open_(tmp_path, path, tokenizer, mode, micro_size=4)
    start = loader.state_dict()
    expected = [loader.next_step()[0] for _ in range(12)]
    loader.load_state_dict(start)
    assert all(same(loader.next_step()[0], batch) for batch in expected)


def test_a_position_in_other_data_is_refused(tmp_path, path, tokenizer) -> None:
    state = open_(tmp_path, path, tokenizer, "packed").state_dict()
    for changed in ({"seed": 1}, {"seq_len": 64}, {"objective": {"kind": "sft", "train_on": "last"}}):
        with pytest.raises(UserError, match=r"checkpoint\.resume"):
            open_(tmp_path, path, tokenizer, "packed", **changed).load_state_dict(state)
    open_(tmp_path, path, tokenizer, "packed", dp_size=4, dp_rank=3, duration="9 steps").load_state_dict(state)


def test_nothing_left_says_why(tmp_path, tokenizer) -> None:
    path = str(write_jsonl(tmp_path / "a.jsonl", [{"instruction": "x " * 200, "output": "y"}]))
    with pytest.raises(UserError, match=r"no sample is left of 1 records .* 1 without a trained token"):
        open_(tmp_path, path, tokenizer, "packed", seq_len=16)
    with pytest.raises(UserError, match="1 longer than seq_len 16"):
        open_(tmp_path, path, tokenizer, "packed", seq_len=16, overlong="drop")
    with pytest.raises(UserError, match=r"a\.jsonl:1: the sample has \d+ tokens"):
        open_(tmp_path, path, tokenizer, "packed", seq_len=16, overlong="stop")


def test_other_objectives_are_refused(tmp_path, path, tokenizer) -> None:
    with pytest.raises(UserError, match=r"objective: .* not dpo"):
        open_(tmp_path, path, tokenizer, "packed", objective="dpo")


def test_width_multiple_makes_all_widths_equal(tmp_path, path, tokenizer) -> None:
    loader = open_(tmp_path, path, tokenizer, "packed", width_multiple=96)
    assert {loader.next_step()[0].input_ids_BS.shape[1] for _ in range(20)} == {96}


def test_micro_batches_of_one_moment_are_neighbours(tmp_path, path, tokenizer) -> None:
    alone = open_(tmp_path, path, tokenizer, "dynamic", micro_size=2, num_micro=6).next_step()
    for rank in range(3):
        mine = open_(tmp_path, path, tokenizer, "dynamic", dp_rank=rank, dp_size=3, micro_size=2, num_micro=2).next_step()
        assert all(same(batch, alone[micro * 3 + rank]) for micro, batch in enumerate(mine))


def test_steps_keep_similar_lengths_in_every_epoch(tmp_path, path, tokenizer) -> None:
    loader = open_(tmp_path, path, tokenizer, "dynamic", micro_size=16, duration="3 epochs")
    steps = [sorted(sum(row) for row in loader.next_step()[0].lengths) for _ in range(18)]
    for first, last in ((0, 6), (7, 12), (13, 18)):  # steps that lie in one epoch of 100 rows: they cut its sorted rows
        ranges = sorted((step[0], step[-1]) for step in steps[first:last])
        assert all(left[1] <= right[0] for left, right in pairwise(ranges))

"""Packing and orders, as properties."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendfactory.engine.data.pack import group_by_length, pack_rows, shuffled

lengths_lists = st.lists(st.integers(1, 32), max_size=200)


@given(lengths_lists, st.integers(1, 50), st.integers(0, 5))
def test_rows_hold_every_sample_once_and_never_too_much(lengths, window, seed) -> None:
    sizes = np.array(lengths, np.int32)
    order = shuffled(sizes.size, seed)
    table = pack_rows(sizes, order, 32, window)
    assert sorted(table.samples.tolist()) == list(range(sizes.size))
    rows = [table.samples[a:b] for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)]
    assert all(0 < sizes[row].sum() <= 32 for row in rows)
    again = pack_rows(sizes, order, 32, window)
    assert (again.samples == table.samples).all() and (again.offsets == table.offsets).all()


@given(lengths_lists)
def test_packing_is_first_fit_decreasing(lengths) -> None:
    sizes = np.array(lengths, np.int32)
    rows: list[int] = []  # by the definition, in quadratic time
    for length in sorted(lengths, reverse=True):
        row = next((r for r, used in enumerate(rows) if used + length <= 32), len(rows))
        rows = [*rows, 0] if row == len(rows) else rows
        rows[row] += length
    table = pack_rows(sizes, np.arange(sizes.size), 32)
    got = [int(sizes[table.samples[a:b]].sum()) for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)]
    assert got == rows


@given(lengths_lists, st.integers(1, 16))
def test_windows_do_not_mix(lengths, window) -> None:
    sizes = np.array(lengths, np.int32)
    table = pack_rows(sizes, np.arange(sizes.size), 32, window)
    for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True):
        assert len({int(sample) // window for sample in table.samples[a:b]}) == 1


def test_a_sample_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="33 tokens"):
        pack_rows(np.array([4, 33]), np.arange(2), 32)


def test_packing_is_fast_enough_for_millions() -> None:
    sizes = np.random.default_rng(0).integers(20, 900, 40_000)
    began = time.process_time()
    table = pack_rows(sizes, np.arange(sizes.size), 2048)
    assert time.process_time() - began < 1.0  # 2 million in 15 s would be 0.3 s; the rest is room for a loaded machine
    assert sizes.sum() / (table.num_rows * 2048) > 0.98


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300), st.integers(1, 9), st.integers(0, 8))
def test_grouping_by_length_is_a_permutation_that_keeps_the_head(lengths, group, head) -> None:
    sizes = np.array(lengths)
    order = shuffled(sizes.size, 1)
    head = min(head, sizes.size)
    grouped = group_by_length(sizes, order, group, head, 2)
    assert sorted(grouped.tolist()) == list(range(sizes.size))
    assert grouped[:head].tolist() == order[:head].tolist()


def test_grouped_steps_have_similar_lengths() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 640)
    grouped = group_by_length(sizes, shuffled(640, 0), 8, 0, 1)
    spread = [np.ptp(sizes[grouped[s : s + 8]]) for s in range(0, 640, 8)]
    assert np.mean(spread) < 30  # random steps spread over about 780

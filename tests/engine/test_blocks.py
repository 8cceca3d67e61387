"""Every visible query-key pair is computed exactly once, on one device, and no hidden pair beside the masked edges."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.engine.blocks import Block, Documents, tiles, whole_rows
from ascendfactory.engine.flash import visible, waves
from ascendfactory.engine.mesh import Axis
from ascendfactory.engine.parallel.context import lay_out

Pair = tuple[int, int, int]  # row, query, key: places in the whole row


@st.composite
def layouts(draw: Any) -> tuple[list[list[int]], int, int, int | None]:
    """Documents of rows, row width, ring, window."""
    ring = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.lists(st.integers(1, 25), max_size=5), min_size=1, max_size=2))
    width = -(-max(1, *map(sum, lengths), 1) // ring) * ring
    return lengths, width, ring, draw(st.none() | st.integers(1, 12))


def wanted(lengths: list[list[int]], window: int | None) -> set[Pair]:
    pairs = set()
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            pairs |= {(row, start + i, start + j) for i in range(length) for j in range(i + 1) if window is None or i - j < window}
            start += length
    return pairs


def keys_of_hop(all_documents: list[Documents], rank: int, hop: int, window: int | None, num_cells: int) -> list[int]:
    """Cells of their owner that the keys of a hop come from."""
    if hop == 0:
        return list(range(num_cells))
    owner = (rank - hop) % len(all_documents)
    plan = all_documents[owner].plan(window)
    return [cell for start, stop in plan.travelling for cell in range(start, stop)][: plan.sizes[owner][hop]]


@settings(max_examples=80, deadline=None)
@given(layouts(), st.integers(1, 4))
def test_each_visible_pair_once(case: tuple[list[list[int]], int, int, int | None], num_rows: int) -> None:
    lengths, width, ring, window = case
    cells = len(lengths) * width // ring
    laid = [lay_out(lengths, width, ring, rank) for rank in range(ring)]
    orders = [order.flatten().tolist() for _, order in laid]
    everyone = [Documents(spans, cells, Axis(ring, rank)) for rank, (spans, _) in enumerate(laid)]
    found: Counter[Pair] = Counter()
    for rank, documents in enumerate(everyone):
        for hop, blocks in enumerate(hop.blocks for hop in documents.plan(window).hops):
            owner, keys = (rank - hop) % ring, keys_of_hop(everyone, rank, hop, window, cells)
            assert window is not None or all(block.offset is None or (hop == 0 and block.is_causal) for block in blocks)
            for tile in (tile for block in blocks for tile in tiles(block, num_rows)):
                mask = np.ones((tile.num_queries, tile.num_keys), bool)
                if tile.offset is not None:
                    mask = visible(tile, "cpu").numpy()  # type: ignore[arg-type]
                assert mask.any(1).all()
                assert mask.any(0).all()
                for i, j in np.argwhere(mask).tolist():
                    query, key = tile.q_start + i, keys[tile.k_start + j]
                    assert query * ring // width == key * ring // width
                    found[query * ring // width, orders[rank][query], orders[owner][key]] += 1
    assert set(found) == wanted(lengths, window)
    assert set(found.values()) <= {1}


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_waves_hold_each_block_once_and_no_query_twice(case: tuple[list[list[int]], int, int, int | None]) -> None:
    lengths, width, ring, window = case
    for rank in range(ring):
        spans, _ = lay_out(lengths, width, ring, rank)
        for hop in Documents(spans, width, Axis(ring, rank)).plan(window).hops:
            blocks = hop.blocks
            grouped = waves(blocks)
            assert sorted((b.q_start, b.k_start) for wave in grouped for b in wave.blocks) == sorted((b.q_start, b.k_start) for b in blocks)
            for wave in grouped:
                queries = [at for b in wave.blocks for at in range(b.q_start, b.q_stop)]
                assert len(queries) == len(set(queries))


def test_window_costs_what_it_shows() -> None:
    """A long document under a window is computed in strips: little more than window x length pairs."""
    (block,) = whole_rows([[8192]], 8192).plan(512).hops[0].blocks
    computed = sum(tile.num_queries * tile.num_keys for tile in tiles(block, 256) if not tile.is_causal)
    assert block == Block(0, 8192, 0, 8192, 0, 512)
    assert computed <= 1.5 * 512 * (8192 - 512)


def test_a_window_wider_than_all_documents_is_none() -> None:
    documents = whole_rows([[30, 40]], 80)
    assert documents.plan(40) is documents.plan(None)
    assert documents.plan(39) is not documents.plan(None)

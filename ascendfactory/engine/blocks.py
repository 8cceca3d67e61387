"""Documents laid out on devices, and the blocks of query-key pairs that follow: nothing that is invisible is ever computed.

A device holds spans of tokens of documents. A span of queries sees a span of keys of the same document that lies before it
entirely, and itself causally; a sliding window cuts both down to what lies inside. Tokens are counted over the flattened
[B·S] cells of a device's rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ascendfactory.engine.mesh import Axis


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start..stop of a document, at cells at.. of a device (or of a travelling buffer)."""

    document: tuple[int, int]  # (row, number)
    start: int
    stop: int
    at: int

    @property
    def end(self) -> int:
        """The cell after its last."""
        return self.at + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of queries and keys. Query i (from 0) stands at key coordinate offset + i.

    offset None: every pair is visible. Else query i sees key j where 0 <= offset + i - j, and < window if there is one.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    offset: int | None = None
    window: int | None = None

    @property
    def num_queries(self) -> int:
        """Rows of the rectangle."""
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        """Columns of the rectangle."""
        return self.k_stop - self.k_start

    @property
    def is_causal(self) -> bool:
        """A square on the diagonal without a window."""
        return self.offset == 0 and self.window is None and self.num_queries == self.num_keys


def banded_block(q: Span, k: Span, window: int | None) -> Block | None:
    """The smallest rectangle of a span of queries and one of keys, before it or the same, with all pairs that see each other.

    >>> banded_block(Span((0, 0), 8, 12, 0), Span((0, 0), 0, 6, 20), 4)
    Block(q_start=0, q_stop=1, k_start=25, k_stop=26, offset=None, window=None)
    """
    if q.start == k.start:
        narrow = window is not None and q.stop - q.start > window
        return Block(q.at, q.end, k.at, k.end, 0, window if narrow else None)
    if k.start > q.start:
        return None
    first_key, last_query = k.start, q.stop - 1
    if window is not None:
        first_key = max(first_key, q.start - window + 1)
        last_query = min(last_query, k.stop - 2 + window)
    if first_key >= k.stop or last_query < q.start:
        return None
    edges = (q.at, q.at + last_query + 1 - q.start, k.at + first_key - k.start, k.end)
    if window is None or last_query - first_key < window:
        return Block(*edges)
    return Block(*edges, q.start - first_key, window)


def tiles(block: Block, num_rows: int) -> Iterator[Block]:
    """Cuts a block into strips of at most num_rows queries, each with only the keys that one of them sees.

    A full block is not cut: it gains nothing. The rows of a window's diagonal that see everything before them are one causal square.
    """
    if block.offset is None:
        yield block
        return
    row = 0
    if block.offset == 0 and block.window is not None:
        row = min(block.window, block.num_queries, block.num_keys)
        yield Block(block.q_start, block.q_start + row, block.k_start, block.k_start + row, 0)
    while row < block.num_queries:
        stop = min(row + num_rows, block.num_queries)
        low = 0 if block.window is None else max(0, block.offset + row - block.window + 1)
        high = min(block.num_keys, block.offset + stop)
        edges = (block.q_start + row, block.q_start + stop, block.k_start + low, block.k_start + high)
        sees_all_before = high - 1 <= block.offset + row
        inside_window = block.window is None or block.offset + stop - 1 - low < block.window
        if sees_all_before and inside_window:
            yield Block(*edges)
        else:
            yield Block(*edges, block.offset + row - low, None if inside_window else block.window)
        row = stop


@dataclass
class Hop:
    """The blocks of one hop, and what a kernel derives from them once for all layers (index tensors on the device)."""

    blocks: list[Block]
    derived: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One device's part of the attention of a micro-batch, for one window.

    Hop h works on the keys of the device h places before in the ring; hop 0 on its own.
    """

    hops: list[Hop]
    travelling: list[tuple[int, int]]  # own cells whose keys others need, as (start, stop), those that go farthest first
    sizes: list[list[int]]  # [device][hop]: cells of its keys that are still travelling when they make that hop
    is_simple: bool  # every query and every key stands in one block only, and nothing travels


@dataclass
class Documents:
    """Where the documents of a micro-batch lie: all that attention needs to know.

    Args:
        shares: spans of each device of the ring, by cell.
        num_cells: B·S cells of a device, the ones gathered by Ulysses included.
        ring, ulysses: this device's places.
    """

    shares: list[list[Span]]
    num_cells: int
    ring: Axis = field(default_factory=Axis)
    ulysses: Axis = field(default_factory=Axis)
    _plans: dict[int | None, Plan] = field(default_factory=dict)

    def plan(self, window: int | None) -> Plan:
        """This device's blocks; made once for each window of the model."""
        if window is not None and all(span.stop <= window for share in self.shares for span in share):
            window = None
        if window not in self._plans:
            self._plans[window] = _make_plan(self.shares, self.ring.rank, window)
        return self._plans[window]


def whole_rows(lengths: list[list[int]], width: int) -> Documents:
    """Documents of rows that lie whole on one device.

    Args:
        lengths: tokens of each document of each row; padding follows.
        width: cells of a row.

    >>> [(span.at, span.end) for span in whole_rows([[3, 2], [4]], 6).shares[0]]
    [(0, 3), (3, 5), (6, 10)]
    """
    spans = []
    for row, row_lengths in enumerate(lengths):
        at = row * width
        for number, length in enumerate(row_lengths):
            if length:
                spans.append(Span((row, number), 0, length, at))
            at += length
    return Documents([spans], len(lengths) * width)


def _make_plan(shares: list[list[Span]], rank: int, window: int | None) -> Plan:
    ring = len(shares)
    reaches = _reaches(shares, window)
    orders = [sorted(reach, key=lambda span: (-reach[span], span.at)) for reach in reaches]
    sizes = [
        [sum(r.stop - r.start for r in order if reach[r] >= hop) for hop in range(ring)]
        for order, reach in zip(orders, reaches, strict=True)
    ]
    hops = [Hop(_local_blocks(shares[rank], window))]
    for hop in range(1, ring):
        origin = (rank - hop) % ring
        arrived, at = [], 0
        for span in orders[origin]:
            if reaches[origin][span] >= hop:
                arrived.append(Span(span.document, span.start, span.stop, at))
                at += span.stop - span.start
        hops.append(Hop(_remote_blocks(shares[rank], arrived, window)))
    is_simple = ring == 1 and all(block.is_causal for block in hops[0].blocks)
    return Plan(hops, _joined((span.at, span.end) for span in orders[rank]), sizes, is_simple)


def _by_document(spans: Iterable[Span]) -> dict[tuple[int, int], list[Span]]:
    found: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.document].append(span)
    return found


def _reaches(shares: list[list[Span]], window: int | None) -> list[dict[Span, int]]:
    """For each device: its spans whose keys some other device needs → how many hops they travel to the last that does."""
    holders: dict[tuple[int, int], list[tuple[int, Span]]] = defaultdict(list)
    for rank, share in enumerate(shares):
        for span in share:
            holders[span.document].append((rank, span))
    reaches: list[dict[Span, int]] = [{} for _ in shares]
    for held in holders.values():
        for owner, keys in held:
            distances = [(rank - owner) % len(shares) for rank, queries in held if banded_block(queries, keys, window)]
            if max(distances, default=0) > 0:
                reaches[owner][keys] = max(distances)
    return reaches


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring ranges as one."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def _local_blocks(share: list[Span], window: int | None) -> list[Block]:
    blocks = []
    for spans in _by_document(share).values():
        if window is None:
            # spans of a document lie side by side in rising order, so one causal square over all of them is exact
            blocks.append(Block(spans[0].at, spans[-1].end, spans[0].at, spans[-1].end, 0))
        else:
            found = (banded_block(q, k, window) for q in spans for k in spans)
            blocks += [block for block in found if block]
    return blocks


def _remote_blocks(share: list[Span], arrived: list[Span], window: int | None) -> list[Block]:
    keys, blocks = _by_document(arrived), []
    for document, queries in _by_document(share).items():
        if window is not None:
            found = (banded_block(q, k, window) for q in queries for k in keys.get(document, ()))
            blocks += [block for block in found if block]
            continue
        seen: list[tuple[int, int, list[tuple[int, int]]]] = []  # queries (start, stop) and the keys they see
        for q in queries:
            visible = _joined((k.at, k.end) for k in keys.get(document, ()) if k.start < q.start)
            if seen and seen[-1][1] == q.at and seen[-1][2] == visible:
                seen[-1] = (seen[-1][0], q.end, visible)
            elif visible:
                seen.append((q.at, q.end, visible))
        blocks += [Block(q_start, q_stop, *k) for q_start, q_stop, visible in seen for k in visible]
    return blocks

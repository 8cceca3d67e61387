"""Which device of a ring computes which tokens of a packed row: equal tokens, equal attention work, few cut documents.

A document of L tokens costs L(L+1)/2 query-key pairs. Short documents live whole on one device and need no exchange. What is
left over, long documents first, is cut the zigzag way: each device takes a run from the head, where queries see little, and one
from the tail, where they see much. How long the two runs are is solved for, so that every device ends with the same number of
tokens and, as far as whole tokens allow, the same work; one document alone gives the plain zigzag of 2 × ring equal runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_IMBALANCE = 0.04  # of the busiest device over the mean: then no further document is cut

Stretch = tuple[int, int, int]  # (document, start, stop): tokens start..stop of a document of the row
Share = list[Stretch]  # what one device holds of a row, by document and position; padding follows


def pairs(start: int, stop: int) -> int:
    """Query-key pairs of the queries start..stop of a document: each sees itself and all before it.

    >>> pairs(0, 3), pairs(1, 3)
    (6, 5)
    """
    return (stop * (stop + 1) - start * (start + 1)) // 2


def work(share: Share) -> int:
    """Query-key pairs that a device computes for its share of a row."""
    return sum(pairs(start, stop) for _, start, stop in share)


def assign(lengths: Sequence[int], width: int, ring: int) -> list[Share]:
    """Deals the tokens of a row to the devices of a ring. Depends on its arguments only, so all devices find the same.

    Args:
        lengths: tokens of each document; width - sum(lengths) cells of padding follow.
        width: cells of the row, a multiple of ring.
        ring: devices.

    Returns:
        Each device's share; every device holds width / ring cells, padding included.

    >>> assign([8], 8, 2)
    [[(0, 0, 2), (0, 6, 8)], [(0, 2, 6)]]
    """
    if ring == 1:
        return [[(document, 0, length) for document, length in enumerate(lengths) if length]]
    total = sum(pairs(0, length) for length in lengths)
    best, lowest = None, float("inf")
    for shares in _attempts(list(lengths), width, ring):
        busiest = max(map(work, shares))
        if busiest < lowest:
            best, lowest = shares, busiest
        if busiest * ring <= total * (1 + MAX_IMBALANCE):
            break
    assert best is not None, "cutting every document is always possible"
    return best


def _attempts(lengths: list[int], width: int, ring: int) -> Iterator[list[Share]]:
    """Assignments with more and more documents cut, the longest first."""
    order = sorted((d for d in range(len(lengths)) if lengths[d]), key=lambda d: (-lengths[d], d))
    num_cut, step = sum(length > width // ring for length in lengths), 1
    while True:
        for by_work in (False, True):
            shares = _place_whole(order[num_cut:], lengths, width // ring, ring, by_work)
            if shares is not None:
                _cut_rest(shares, order[:num_cut], lengths, width)
                yield [sorted(share) for share in shares]
        if num_cut == len(order):
            return
        num_cut, step = min(num_cut + step, len(order)), 2 * step


def _place_whole(documents: list[int], lengths: list[int], room: int, ring: int, by_work: bool) -> list[Share] | None:
    """Puts each document, longest first, on the device that has the least so far; None if one fits nowhere."""
    shares: list[Share] = [[] for _ in range(ring)]
    tokens, load = [0] * ring, [0] * ring
    for document in documents:
        length = lengths[document]
        fitting = [rank for rank in range(ring) if tokens[rank] + length <= room]
        if not fitting:
            return None
        rank = min(fitting, key=lambda r: (load[r] if by_work else tokens[r], load[r], r))
        shares[rank].append((document, 0, length))
        tokens[rank] += length
        load[rank] += pairs(0, length)
    return shares


def _cut_rest(shares: list[Share], documents: list[int], lengths: list[int], width: int) -> None:
    """Cuts the documents so that tokens and work become equal; the longest, which can even out most, comes last."""
    ring = len(shares)
    rooms = [width // ring - sum(stop - start for _, start, stop in share) for share in shares]
    padding = _in_proportion(width - sum(lengths), rooms)
    rooms = [room - cells for room, cells in zip(rooms, padding, strict=True)]
    mean_work = sum(pairs(0, length) for length in lengths) / ring
    for document in reversed(documents):
        tokens = _in_proportion(lengths[document], rooms)
        wanted = [max(mean_work - work(share), 0.0) for share in shares]
        scale = pairs(0, lengths[document]) / (sum(wanted) or 1.0)
        cut = _zigzag(lengths[document], tokens, [scale * amount for amount in wanted])
        for rank, runs in enumerate(cut):
            shares[rank] += [(document, start, stop) for start, stop in runs]
            rooms[rank] -= tokens[rank]


def _in_proportion(total: int, rooms: list[int]) -> list[int]:
    """Whole numbers that sum to `total`, in proportion to the rooms and none above its own."""
    space = sum(rooms)
    if space == 0:
        return [0] * len(rooms)
    parts = [total * room // space for room in rooms]
    left = total - sum(parts)
    for rank in sorted(range(len(rooms)), key=lambda r: (-(total * rooms[r] % space), r))[:left]:
        parts[rank] += 1
    return parts


def _zigzag(length: int, tokens: list[int], wanted: list[float]) -> list[list[tuple[int, int]]]:
    """Cuts one document, outside inwards, into a head and a tail run for each device.

    With [low, high) still uncut and T tokens to take, a head of h tokens and a tail of T - h do the work
    Σ (position + 1) = T + T·high - T²/2 - T/2 - h·(high - low - T), linear in h; so h follows from the work that is wanted.
    """
    runs: list[list[tuple[int, int]]] = [[] for _ in tokens]
    low, high = 0, length
    # who needs the lightest or the heaviest queries chooses first; the middle is left to who wants the average
    takers = [rank for rank, count in enumerate(tokens) if count]
    for rank in sorted(takers, key=lambda r: (-abs(wanted[r] / tokens[r] - length / 2), r)):
        count = tokens[rank]
        inside = high - low - count
        head = 0 if inside == 0 else round((count * (high + 0.5) - count * count / 2 - wanted[rank]) / inside)
        head = min(max(head, 0), count)
        ends = [(low, low + head), (high - count + head, high)]
        runs[rank] = [(start, stop) for start, stop in ends if start < stop]
        low, high = low + head, high - count + head
    return runs

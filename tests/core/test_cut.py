"""Cuts of a model into pipeline chunks: complete, in order, and as even as any."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendfactory.catalog.read import find_card
from ascendfactory.core.plan import Layout
from ascendfactory.core.stages import V_SHAPED, StageCosts, chunks_of, cut, layout_cut, model_costs, owner, schedule_problem

WEIGHTS = st.floats(0.1, 10.0)


def chunk_costs(ranges: list[range], costs: StageCosts) -> list[float]:
    totals = [sum(costs.layers[i] for i in layers) for layers in ranges]
    totals[0] += costs.embedding
    totals[-1] += costs.head
    return totals


@given(st.lists(WEIGHTS, min_size=1, max_size=7), st.integers(1, 3), st.integers(1, 2), WEIGHTS, WEIGHTS)
def test_no_cut_is_better(layers: list[float], pp: int, vpp: int, embedding: float, head: float) -> None:
    costs = StageCosts(tuple(layers), embedding, head)
    ranges = cut(pp, vpp, costs)
    assert [i for part in ranges for i in part] == list(range(len(layers)))
    totals = chunk_costs(ranges, costs)
    every = []
    for inner in itertools.combinations_with_replacement(range(len(layers) + 1), pp * vpp - 1):
        bounds = [0, *inner, len(layers)]
        every.append(chunk_costs([range(a, b) for a, b in itertools.pairwise(bounds)], costs))
    best = min(max(each) for each in every)
    assert max(totals) == pytest.approx(best, rel=1e-9)
    evenest = min(sum(t * t for t in each) for each in every if max(each) <= best * (1 + 1e-9))
    assert sum(t * t for t in totals) == pytest.approx(evenest, rel=1e-9)


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from(["1f1b", "interleaved", "zbv", "dualpipev"]))
def test_every_chunk_has_one_owner(pp: int, vpp: int, schedule: str) -> None:
    vpp = 2 if schedule in V_SHAPED else vpp
    owned = [chunks_of(rank, pp, vpp, schedule) for rank in range(pp)]  # type: ignore[arg-type]
    assert sorted(itertools.chain(*owned)) == list(range(pp * vpp))
    assert all(len(chunks) == vpp for chunks in owned)
    if schedule in V_SHAPED:
        assert owned == [[rank, 2 * pp - 1 - rank] for rank in range(pp)]
        assert owner(0, pp, vpp, schedule) == owner(2 * pp - 1, pp, vpp, schedule)  # type: ignore[arg-type]


def test_layers_by_hand() -> None:
    costs = StageCosts((1.0,) * 5)
    assert cut(2, 2, costs, [2, 2, 1, 0]) == [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    for wrong in ([3, 3], [2, 2, 1], [3, 3, -1, 0]):
        with pytest.raises(ValueError, match="add up to 5"):
            cut(2, 2, costs, wrong)


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    """Qwen3-0.6B: the head multiplies 155.6 M weights, a layer 15.7 M, so the last of 4 stages has the fewest layers."""
    card = find_card("qwen3-0.6b")
    costs = model_costs(card, 4096)
    ranges = layout_cut(Layout(pp=4), costs)
    sizes = [len(part) for part in ranges]
    assert sum(sizes) == card.num_layers == 28
    assert sizes[-1] < min(sizes[:-1])
    assert layout_cut(Layout(pp=4, stage_layers=(7, 7, 7, 7)), costs) == [range(i, i + 7) for i in (0, 7, 14, 21)]


@pytest.mark.parametrize(
    "schedule,pp,vpp,num_micro,fix",
    [
        ("1f1b", 2, 2, 8, "layout.vpp: 1"),
        ("interleaved", 2, 1, 8, "1f1b"),
        ("zbv", 2, 1, 8, "layout.vpp: 2"),
        ("interleaved", 4, 2, 9, "batch.global_size"),
        ("dualpipev", 4, 2, 7, "zbv"),
    ],
)
def test_schedules_that_do_not_fit(schedule: str, pp: int, vpp: int, num_micro: int, fix: str) -> None:
    problem = schedule_problem(schedule, pp, vpp, num_micro)  # type: ignore[arg-type]
    assert problem is not None and all(fix in text for text in problem)


@pytest.mark.parametrize(
    "schedule,pp,vpp,num_micro",
    [("1f1b", 4, 1, 2), ("gpipe", 4, 1, 1), ("interleaved", 4, 2, 12), ("interleaved", 4, 2, 3), ("dualpipev", 4, 2, 8)],
)
def test_schedules_that_fit(schedule: str, pp: int, vpp: int, num_micro: int) -> None:
    assert schedule_problem(schedule, pp, vpp, num_micro) is None  # type: ignore[arg-type]

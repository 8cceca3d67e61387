"""The tables of every schedule: complete, free of deadlock, and idle for as long as theory says."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendfactory.core.recipe import Schedule
from ascendfactory.core.stages import SPLIT_BACKWARD, owner, schedule_problem
from ascendfactory.engine.parallel.schedule import Tables, forward_tables, play, training_tables

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """A schedule, pp, vpp and number of micro-batches that fit each other."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(2, 5))
    vpp = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}.get(schedule) or draw(st.integers(2, 3))
    return schedule, pp, vpp, draw(st.integers(1, 13).filter(lambda m: schedule_problem(schedule, pp, vpp, m) is None))


def run_blocking(tables: Tables, pp: int, vpp: int, schedule: Schedule) -> None:
    """Sends and receives that each wait for the other side, the strictest device there is; fails on a deadlock or a wrong message."""
    queues = [deque(actions) for actions in tables]
    partner = {"send_forward": ("receive_forward", 1), "send_backward": ("receive_backward", -1)}
    while any(queues):
        moved = False
        for queue in queues:
            while queue and queue[0].computes:
                queue.popleft()
                moved = True
            if queue and queue[0].kind in partner:
                kind, step = partner[queue[0].kind]
                other = queues[owner(queue[0].chunk + step, pp, vpp, schedule)]
                if other and other[0] == (kind, queue[0].chunk + step, queue[0].micro):
                    queue.popleft()
                    other.popleft()
                    moved = True
        assert moved, [queue[0] if queue else None for queue in queues]


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_tables_are_complete_and_never_wait_for_each_other(layout: tuple[Schedule, int, int, int]) -> None:
    schedule, pp, vpp, num_micro = layout
    tables = training_tables(schedule, pp, vpp, num_micro)
    work = Counter((a.kind, a.chunk, a.micro) for actions in tables for a in actions if a.computes)
    assert set(work.values()) == {1}
    for chunk in range(pp * vpp):
        for micro in range(num_micro):
            assert work["forward", chunk, micro] == 1
            assert work["backward", chunk, micro] + work["input", chunk, micro] == 1
            assert work["input", chunk, micro] == work["weight", chunk, micro]
    assert schedule in SPLIT_BACKWARD or not any(kind in ("input", "weight") for kind, _, _ in work)
    for rank, actions in enumerate(tables):
        assert all(owner(a.chunk, pp, vpp, schedule) == rank for a in actions)
    play(tables)
    run_blocking(tables, pp, vpp, schedule)
    run_blocking(forward_tables(schedule, pp, vpp, num_micro), pp, vpp, schedule)


@pytest.mark.parametrize("pp,num_micro", [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
def test_idle_time_is_that_of_theory(pp: int, num_micro: int) -> None:
    """(pp - 1) / (v·m + pp - 1) of the step for GPipe, 1F1B (v = 1) and interleaved 1F1B (arXiv:2104.04473)."""
    for schedule, vpp in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        timeline = play(training_tables(schedule, pp, vpp, num_micro))  # type: ignore[arg-type]
        assert timeline.idle_share == pytest.approx((pp - 1) / (vpp * num_micro + pp - 1), rel=1e-12)


@pytest.mark.parametrize("pp,num_micro", [(2, 8), (4, 12), (8, 32)])
def test_split_backward_leaves_only_the_fill_of_the_pipeline(pp: int, num_micro: int) -> None:
    """With halves as long as a forward: (pp - 1)(F + B - W) slots of one chunk (ZB-H1, arXiv:2401.10241, table 2)."""
    for schedule, vpp in (("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)):
        timeline = play(training_tables(schedule, pp, vpp, num_micro))  # type: ignore[arg-type]
        assert timeline.busy == [3.0 * vpp * num_micro] * pp
        assert timeline.length - timeline.busy[0] == pp - 1

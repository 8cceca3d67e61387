"""Micro-batches in flight and bubbles against torch's own schedules, played action by action."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import schedules

from ascendfactory.catalog.read import find_card, find_device
from ascendfactory.core.load import load_recipe
from ascendfactory.core.plan import Cluster, Layout
from ascendfactory.core.recipe import Schedule
from ascendfactory.core.stages import chunks_of
from ascendfactory.planner import memory, time
from ascendfactory.planner.engines import engine_of
from ascendfactory.planner.grid import grid_of
from ascendfactory.planner.memory import Columns, Setting

TORCH = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
TIMES = {"FORWARD": 1.0, "FULL_BACKWARD": 2.0, "BACKWARD_INPUT": 1.0, "BACKWARD_WEIGHT": 1.0}


class Stage:
    """As much of a torch stage as its schedules ask about."""

    def __init__(self, chunk: int, pp: int, vpp: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = chunk, pp * vpp, pp, 0
        self.is_first, self.is_last, self.has_backward = chunk == 0, chunk == pp * vpp - 1, True
        self.device, self.group, self.submod, self.stage_index_to_group_rank = "cpu", None, torch.nn.Linear(1, 1), None


def actions(name: Schedule, pp: int, vpp: int, num_micro: int) -> dict[int, list[tuple[str, int, int]]]:
    """Rank → its (kind, chunk, micro-batch) in torch's order."""
    stages: list[Any] = [Stage(chunk, pp, vpp) for chunk in chunks_of(0, pp, vpp, name)]
    orders = TORCH[name](stages, num_micro, loss_fn=lambda *_: None).pipeline_order
    parts = {rank: [part for action in row if action for part in (action.sub_actions or [action])] for rank, row in orders.items()}
    return {rank: [(a.computation_type.name, a.stage_index, a.microbatch_index) for a in row] for rank, row in parts.items()}


def played(name: Schedule, pp: int, vpp: int, num_micro: int) -> tuple[float, list[int]]:
    """Idle time of the whole step in forward passes of a chunk, and the most chunks that each rank holds."""
    orders, ends = actions(name, pp, vpp, num_micro), dict[tuple[str, int, int], float]()
    clock = dict.fromkeys(orders, 0.0)
    live, most, at = (dict.fromkeys(orders, 0) for _ in range(3))
    while any(at[rank] < len(orders[rank]) for rank in orders):
        for rank, order in orders.items():
            while at[rank] < len(order):
                kind, chunk, micro = order[at[rank]]
                needs = [("F", chunk, micro)]
                if kind == "FORWARD":
                    needs = [("F", chunk - 1, micro)] if chunk else []
                elif kind != "BACKWARD_WEIGHT":
                    needs += [("B", chunk + 1, micro)] if chunk < pp * vpp - 1 else []
                if any(need not in ends for need in needs):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in needs)]) + TIMES[kind]
                if kind != "BACKWARD_WEIGHT":
                    ends["F" if kind == "FORWARD" else "B", chunk, micro] = clock[rank]
                live[rank] += (kind == "FORWARD") - (kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"))
                most[rank] = max(most[rank], live[rank])
                at[rank] += 1
    return max(clock.values()) - 3 * vpp * num_micro, [most[rank] for rank in sorted(most)]


CASES = [
    (name, pp, vpp, num_micro)
    for pp, num_micro in ((2, 8), (4, 8), (4, 16), (8, 32))
    for name, vpp in (("interleaved", 2), ("interleaved", 4), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2))
]


@pytest.mark.parametrize(("name", "pp", "vpp", "num_micro"), CASES)
def test_flight_and_bubble_are_those_of_torchs_schedules(name: Schedule, pp: int, vpp: int, num_micro: int) -> None:
    cluster = Cluster(device=find_device("snt9b"), nodes=1, nproc=8)
    setting = Setting(find_card("llama-3.1-8b"), load_recipe("model: m\ndata: d"), cluster, "bfloat16", engine_of("native"))
    layout = Layout(pp=pp, vpp=vpp, schedule=name, num_micro=num_micro)
    grid = grid_of([layout])
    idle, most = played(name, pp, vpp, num_micro)
    assert np.broadcast_to(memory._in_flight(Columns(setting, grid, setting.stages(layout))), (1, pp))[0].tolist() == most
    assert time._bubble(setting, grid)[0] * 3 * vpp == pytest.approx(idle)

"""The order of a pipeline's work on every device: torch's published schedules as plain tables, and the idle time they leave.

GPipe (Huang et al. 2018, arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473), zero-bubble and its
V-shaped form (Qi et al. 2023, arXiv:2401.10241; 2024, arXiv:2405.15362), DualPipeV (DeepSeek-V3, arXiv:2412.19437).
torch.distributed.pipelining knows the orders; what is used of its internals stands in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch.distributed.pipelining.schedules as torch_schedules

from ascendfactory.core.recipe import Schedule
from ascendfactory.core.stages import chunks_of, owner

# forward; whole backward; its halves: gradient of the input, gradients of the weights; messages of activations and gradients
Kind = Literal["forward", "backward", "input", "weight", "send_forward", "receive_forward", "send_backward", "receive_backward"]

COSTS: Mapping[str, float] = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}  # in forwards of one chunk

_KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
    "SEND_F": "send_forward",
    "RECV_F": "receive_forward",
    "SEND_B": "send_backward",
    "RECV_B": "receive_backward",
}
_COMPUTES = ("forward", "backward", "input", "weight")
_MULTI: dict[Schedule, str] = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Action(NamedTuple):
    """One thing that a device does: work on a chunk for a micro-batch, or a message that carries its result."""

    kind: Kind
    chunk: int
    micro: int

    @property
    def computes(self) -> bool:
        """Whether it is work and no message."""
        return self.kind in _COMPUTES


Tables = list[list[Action]]  # by pipeline rank


def training_tables(schedule: Schedule, pp: int, vpp: int, num_micro: int) -> Tables:
    """What every pipeline rank does in one optimizer step, messages included, in order.

    Any two ranks list the messages between them in the same order, so devices that send one after another never wait for each other.

    Raises:
        ValueError: the schedule does not fit the counts (see `core.stages.schedule_problem`).
    """
    if schedule in _MULTI:
        parts = [
            SimpleNamespace(group_size=pp, group_rank=0, num_stages=pp * vpp, stage_index=chunk, submod=None, has_backward=True)
            for chunk in chunks_of(0, pp, vpp, schedule)
        ]
        made: Any = getattr(torch_schedules, _MULTI[schedule])(parts, num_micro, loss_fn=lambda *_: None, scale_grads=False)
        order = made.pipeline_order
    elif schedule == "1f1b":
        order = {rank: _one_forward_one_backward(rank, pp, num_micro) for rank in range(pp)}
    else:
        every = range(num_micro)
        order = {rank: [_act(rank, "FORWARD", i) for i in every] + [_act(rank, "FULL_BACKWARD", i) for i in every] for rank in range(pp)}
    return _with_messages({rank: _flat(actions) for rank, actions in order.items()}, pp, vpp, schedule)


def forward_tables(schedule: Schedule, pp: int, vpp: int, num_micro: int) -> Tables:
    """The same for evaluation: forward passes only, pp micro-batches at a time through each chunk."""
    order = {}
    for rank in range(pp):
        mine = chunks_of(rank, pp, vpp, schedule)
        rounds = [range(start, min(start + pp, num_micro)) for start in range(0, num_micro, pp)]
        order[rank] = [_act(chunk, "FORWARD", micro) for some in rounds for chunk in mine for micro in some]
    return _with_messages(order, pp, vpp, schedule)


def _act(chunk: int, kind: str, micro: int) -> Any:
    return torch_schedules._Action(chunk, torch_schedules._ComputationType[kind], micro)


def _one_forward_one_backward(rank: int, pp: int, num_micro: int) -> list[Any]:
    """1F1B of one rank. (torch 2.13's own table of it, made for pictures, leaves out the last stage's first micro-batch.)"""
    ahead = min(pp - 1 - rank, num_micro)  # forwards before the first backward comes back
    actions = [_act(rank, "FORWARD", i) for i in range(ahead)]
    for i in range(num_micro):
        if ahead + i < num_micro:
            actions.append(_act(rank, "FORWARD", ahead + i))
        actions.append(_act(rank, "FULL_BACKWARD", i))
    return actions


def _flat(actions: Sequence[Any]) -> list[Any]:
    """Work only, pairs that torch would overlap one after the other."""
    singles = [part for action in actions if action is not None for part in (action.sub_actions or (action,))]
    return [action for action in singles if action.computation_type.name in _KINDS]


def _with_messages(order: dict[int, list[Any]], pp: int, vpp: int, schedule: Schedule) -> Tables:
    whom: Callable[[int], int] = lambda chunk: owner(chunk, pp, vpp, schedule)  # noqa: E731
    listed = {rank: actions for rank, actions in order.items() if actions}
    lowered = torch_schedules._add_send_recv(listed, stage_to_rank=whom, num_stages=pp * vpp)
    return [
        [Action(_KINDS[a.computation_type.name], int(a.stage_index), int(a.microbatch_index or 0)) for a in lowered.get(rank, [])]
        for rank in range(pp)
    ]


class Timeline(NamedTuple):
    """A step of a schedule, played through."""

    length: float  # from the first action to the last, in forwards of one chunk
    busy: list[float]  # by pipeline rank

    @property
    def idle_share(self) -> float:
        """Mean share of the step in which a device waits."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.length)


def play(tables: Tables, costs: Mapping[str, float] = COSTS) -> Timeline:
    """Plays the tables with work of given costs and messages of none: each action begins when its input is there.

    Raises:
        ValueError: the ranks wait for each other.
    """
    num_chunks = 1 + max(action.chunk for actions in tables for action in actions)
    done: dict[tuple[str, int, int], float] = {}
    clock, at, busy = [0.0] * len(tables), [0] * len(tables), [0.0] * len(tables)
    work = [[action for action in actions if action.computes] for actions in tables]
    while any(place < len(actions) for place, actions in zip(at, work, strict=True)):
        moved = False
        for rank, actions in enumerate(work):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needs = _needs(action, num_chunks)
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + costs[action.kind]
                busy[rank] += costs[action.kind]
                done[_result(action), action.chunk, action.micro] = clock[rank]
                at[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the ranks of this schedule wait for each other")
    return Timeline(max(clock), busy)


def _result(action: Action) -> str:
    return "gradient" if action.kind in ("backward", "input") else action.kind


def _needs(action: Action, num_chunks: int) -> list[tuple[str, int, int]]:
    chunk, micro = action.chunk, action.micro
    if action.kind == "forward":
        return [("forward", chunk - 1, micro)] if chunk else []
    if action.kind == "weight":
        return [("gradient", chunk, micro)]
    return [("forward", chunk, micro)] + ([("gradient", chunk + 1, micro)] if chunk + 1 < num_chunks else [])

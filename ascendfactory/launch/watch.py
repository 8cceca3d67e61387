"""What reaches a job from outside while it runs: signals of this machine, and news of the other nodes."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ascendfactory.core.plan import StepMetrics
from ascendfactory.launch.failure import USER_ERROR
from ascendfactory.launch.team import Lost, Message, Team

# After the first failure on any node the others have so long to fail as well: what is then known tells the cause from its effects.
GRACE_S = 3.0
# A node that has lost a rank ends by itself, telling why: torchrun waits up to 30 s for its other ranks.
LAST_WORDS_S = 45.0
INTERRUPTED = 130
Event = dict[str, Any]  # kind, text_en, text_zh and what belongs to the kind
End = dict[str, Any]  # how a job ended on one node: code, killed, signalled, event, host


class Watch:
    """Signals and other nodes, looked at a few times a second.

    Args:
        team: the nodes.
        on_step: gets the steps that other nodes report (Megatron prints them on the last).
        on_event: gets their events.
    """

    def __init__(self, team: Team, on_step: Callable[[StepMetrics], None], on_event: Callable[[Event], None]) -> None:
        self.team, self._on_step, self._on_event = team, on_step, on_event
        self.signals: list[int] = []  # still to be passed to the job
        self.signalled = False
        self.must_kill = False
        self._at_once = False  # not even a save is waited for
        self._failed_s: float | None = None  # when the first failure of any node was heard of
        self._own_failed_s: float | None = None
        self.order: list[int] = []  # nodes that failed, the first first (node 0 knows them all)

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Takes SIGINT and SIGTERM; outside the main thread Python forbids it and signals stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def tick(self) -> None:
        """Hears the other nodes, and tells them of what happened here."""
        try:
            self.team.poll(self.hear)
        except Lost as lost:
            self._fail(lost.rank)
            self.must_kill |= lost.rank == 0
        self._end_grace()

    def next_signal(self) -> int | None:
        """The next signal for the job, told to the other nodes; a second SIGINT means: at once."""
        if not self.signals:
            return None
        number = self.signals.pop(0)
        if not self.signalled:
            self.signalled = True
            self.team.tell({"kind": "stop", "number": number})
            return number
        if number == signal.SIGINT:
            self._at_once = True
            self._kill()
        return None

    def _kill(self) -> None:
        """Everything is to end, here and on the other nodes."""
        self.must_kill = True
        self.team.tell({"kind": "kill", "at_once": self._at_once})

    def is_time_to_kill(self) -> bool:
        """Whether the job of this node is to be killed now; one that is failing by itself is given time to say why."""
        own = self._own_failed_s
        return self.must_kill and (self._at_once or own is None or time.monotonic() - own > LAST_WORDS_S)

    def failing(self) -> None:
        """The job of this node has lost a process, or has failed."""
        if self._own_failed_s is None:
            self._own_failed_s = time.monotonic()
            self._fail(self.team.place.rank)
            self.team.tell({"kind": "failing"})

    def settle(self, code: int, *, killed: bool = False, event: Event | None = None) -> list[End]:
        """How a task ended on every node, in the order of ranks; waits for all of them."""
        if code not in (0, INTERRUPTED) and not killed:
            self.failing()
        own = {"code": code, "killed": killed, "signalled": self.signalled, "event": event, "host": socket.gethostname()}
        try:
            ends = self.team.gather(own | {"order": self.order}, self.hear, self._check)
        except Lost as lost:
            self._kill()
            return [lost_end(lost.rank)]
        self._failed_s = self._own_failed_s = None
        self.must_kill = False
        return ends

    def _check(self) -> None:
        """While this node waits for the others."""
        self.next_signal()
        self._end_grace()

    def _end_grace(self) -> None:
        # after a signal one rank may be gone while another still saves
        grace_s = LAST_WORDS_S if self.signalled else GRACE_S
        over = self._failed_s is not None and time.monotonic() - self._failed_s > grace_s
        if over and self.team.is_first and not self.must_kill:
            self._kill()

    def _fail(self, rank: int) -> None:
        self._failed_s = self._failed_s or time.monotonic()
        if rank not in self.order:
            self.order.append(rank)

    def hear(self, rank: int, message: Message) -> None:
        """One message of another node."""
        match message["kind"]:
            case "step":
                self._on_step(StepMetrics.model_validate(message["step"]))
            case "event":
                self._on_event(message["event"])
            case "failing":
                self._fail(rank)
            case "stop":
                if not self.signalled:
                    self.signals.append(int(message["number"]))
            case "kill":
                is_news = not self.must_kill or (message["at_once"] and not self._at_once)
                self.must_kill, self._at_once = True, self._at_once or message["at_once"]
                if self.team.is_first and is_news:
                    self._kill()


def lost_end(rank: int) -> End:
    """The end of a node that cannot tell its own."""
    event = {
        "kind": "failed",
        "code": 1,
        "text_en": f"node {rank} was lost: its line closed, or it was silent for a minute",
        "text_zh": f"节点 {rank} 失联：连接关闭，或一分钟没有消息",
        "lines": [],
    }
    return {"code": 1, "killed": False, "signalled": False, "event": event, "host": "", "lost": True, "order": []}


def cause(ends: list[End]) -> int | None:
    """Which node's end explains the others, or None where all went well or were stopped.

    A process that a signal killed is a cause, whoever noticed first; a user error is one as well (SIGTERM is how torchrun ends
    the ranks that it still has); else the node that failed first.
    """
    failed = [rank for rank, end in enumerate(ends) if end["code"] not in (0, INTERRUPTED) and not end["killed"]]
    if not failed:
        return None
    first: list[int] = [rank for rank in ends[0]["order"] if rank in failed] + failed
    killed = [rank for rank in first if ends[rank]["code"] > 128 and ends[rank]["code"] != 128 + signal.SIGTERM]
    wrong = [rank for rank in first if ends[rank]["code"] == USER_ERROR]
    return (killed or wrong or first)[0]

"""The launchers of a job's nodes, in touch with each other: node 0 listens, the others connect to it and stay connected.

One message is one line of JSON. A star of plain TCP needs nothing installed, works however the nodes were started (ssh, Slurm,
Kubernetes, by hand), and tells at once when a node is gone: its line closes, or is silent for `SILENT_S`.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ascendfactory.core.messages import UserError
from ascendfactory.launch.place import Place

MEET_S = 600.0  # how long nodes wait for each other at the start: containers are pulled at different speeds
SILENT_S = 60.0  # a node that says nothing for so long is lost
_PING_S = 5.0
_POLL_S = 0.2
Message = dict[str, Any]
Handler = Callable[[int, Message], None]  # rank of the sender, what it said


class Lost(Exception):
    """The line to a node closed before the job was over."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"node {rank} was lost")


class Team:
    """All nodes of a job, as one of them sees them; a node alone is a team as well.

    Args:
        place: where this node stands.
        name: what the nodes have come to run; a node that came for something else is turned away.
        meet_s: how long to wait for the others.

    Raises:
        UserError: the port is in use, a node did not come, or came for another run.
    """

    def __init__(self, place: Place, name: str = "", meet_s: float = MEET_S) -> None:
        self.place = place
        self._links: dict[int, _Link] = {}
        self._inbox: queue.Queue[tuple[int, Message]] = queue.Queue()
        self._round = 0
        self._early: list[tuple[int, Message]] = []  # values of a later round, or news, that came while something else was awaited
        self.lost: set[int] = set()
        if place.nodes > 1:
            (self._listen if place.rank == 0 else self._join)(name, time.monotonic() + meet_s)
            threading.Thread(target=self._ping, daemon=True).start()

    @property
    def is_first(self) -> bool:
        """Whether this is node 0, which runs what is done once."""
        return self.place.rank == 0

    def tell(self, message: Message) -> None:
        """Node 0 tells every other node; any other node tells node 0."""
        for link in list(self._links.values()):
            link.send(message)

    def poll(self, handle: Handler) -> None:
        """Hands on what other nodes have said since the last call.

        Raises:
            Lost: a node is gone; once for each.
        """
        early, self._early = self._early, []
        for rank, message in early:
            self._take(rank, message, handle)
        while True:
            try:
                rank, message = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._take(rank, message, handle)

    def gather(self, value: Any, handle: Handler = lambda rank, message: None, check: Callable[[], None] = lambda: None) -> list[Any]:
        """The values of all nodes in the order of their ranks, on every node; waits for the slowest.

        Args:
            value: this node's, JSON.
            handle: gets the other messages that come meanwhile.
            check: called while waiting, several times a second; what it raises ends the wait.

        Raises:
            Lost: a node went away before its value came.
        """
        if self.place.nodes == 1:
            return [value]
        this, self._round = self._round, self._round + 1
        if not self.is_first:
            self.tell({"kind": "value", "round": this, "value": value})
            return list(self._await("values", this, [0], handle, check)[0])
        others = self._await("value", this, range(1, self.place.nodes), handle, check)
        values = [value, *(others[rank] for rank in range(1, self.place.nodes))]
        self.tell({"kind": "values", "round": this, "value": values})
        return values

    def close(self) -> None:
        """Leaves; the others are told that nothing is wrong."""
        self.tell({"kind": "bye"})
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _await(self, kind: str, this: int, ranks: Any, handle: Handler, check: Callable[[], None]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        waiting, early = set(ranks), self._early
        self._early = []
        while waiting:
            if gone := {rank for rank in waiting if rank in self.lost or rank not in self._links}:
                raise Lost(min(gone))
            try:
                rank, message = early.pop(0) if early else self._inbox.get(timeout=_POLL_S)
            except queue.Empty:
                check()
                continue
            if message["kind"] == kind and message["round"] == this:
                found[rank] = message["value"]
                waiting.discard(rank)
            else:
                self._take(rank, message, handle)
        self._early += early
        return found

    def _take(self, rank: int, message: Message, handle: Handler) -> None:
        match message["kind"]:
            case "value" | "values":
                self._early.append((rank, message))
            case "lost":
                if rank in self._links and rank not in self.lost:
                    self.lost.add(rank)
                    raise Lost(rank)
            case "bye":
                self._links.pop(rank, None)
            case _:
                handle(rank, message)

    def _listen(self, name: str, deadline_s: float) -> None:
        place = self.place
        with _serving(place.meeting_port) as server:
            while len(self._links) < place.nodes - 1:
                server.settimeout(max(0.01, deadline_s - time.monotonic()))
                try:
                    line, _ = server.accept()
                except TimeoutError:
                    raise _absent(place, sorted(set(range(1, place.nodes)) - set(self._links))) from None
                link = _Link(line)
                hello = link.receive() or {}
                rank = int(hello.get("rank", 0))
                if hello.get("name") != name or not 0 < rank < place.nodes or rank in self._links:
                    link.send({"kind": "refused", "name": name, "nodes": place.nodes})
                    link.close()
                    continue
                link.send({"kind": "welcome"})
                self._links[rank] = link
        for rank, link in self._links.items():
            link.follow(rank, self._inbox)

    def _join(self, name: str, deadline_s: float) -> None:
        place = self.place
        while True:
            try:
                line = socket.create_connection((place.master_addr, place.meeting_port), timeout=10)
                break
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise UserError(
                        f"{place.master_addr}:{place.meeting_port}",
                        f"node 0 does not answer ({error.strerror or error}); is it started, and is the port open between the nodes?",
                        f"节点 0 没有应答（{error.strerror or error}）；它启动了吗？节点之间的该端口是否开放？",
                    ) from None
                time.sleep(0.5)
        link = _Link(line)
        link.send({"kind": "hello", "rank": place.rank, "name": name})
        answer = link.receive() or {}
        if answer.get("kind") != "welcome":
            raise UserError(
                f"node {place.rank}",
                f"node 0 runs '{answer.get('name', '?')}' on {answer.get('nodes', '?')} nodes, this one '{name}' on {place.nodes}; "
                "start the same recipe with the same NNODES everywhere, each NODE_RANK once",
                f"节点 0 在 {answer.get('nodes', '?')} 个节点上运行“{answer.get('name', '?')}”，本节点为 {place.nodes} 个节点的“{name}”；"
                "请在各节点以相同的 NNODES 启动同一配方，且每个 NODE_RANK 只用一次",
            )
        self._links[0] = link
        link.follow(0, self._inbox)

    def _ping(self) -> None:
        while self._links:
            self.tell({"kind": "ping"})
            time.sleep(_PING_S)


class _Link:
    """One TCP line of JSON messages."""

    def __init__(self, line: socket.socket) -> None:
        line.settimeout(SILENT_S)
        self._line, self._reader, self._sending = line, line.makefile("rb"), threading.Lock()

    def send(self, message: Message) -> None:
        """Sends; a line that is closed is noticed by its reader."""
        try:
            with self._sending:
                self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> Message | None:
        """The next message; None when the line is closed, silent, or speaks something else."""
        try:
            message = json.loads(self._reader.readline())
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def follow(self, rank: int, inbox: queue.Queue[tuple[int, Message]]) -> None:
        """Puts every message into the inbox, from a thread, and at the end `lost`."""

        def read() -> None:
            while message := self.receive():
                if message.get("kind") != "ping":
                    inbox.put((rank, message))
            inbox.put((rank, {"kind": "lost"}))

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        """Closes the line in both directions."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()


@contextmanager
def _serving(port: int) -> Iterator[socket.socket]:
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise port_in_use(port, error) from None
    with server:
        yield server


def port_in_use(port: int, error: OSError) -> UserError:
    """The error to raise where a port cannot be listened at."""
    return UserError(
        f"port {port}",
        f"cannot be listened at ({os.strerror(error.errno or 0)}); end what holds it, or export MASTER_PORT=<another> "
        "(it and the next are used)",
        f"无法监听（{os.strerror(error.errno or 0)}）；请结束占用者，或 export MASTER_PORT=<其他端口>（使用该端口及下一个）",
    )


def _absent(place: Place, ranks: list[int]) -> UserError:
    names = ", ".join(map(str, ranks))
    return UserError(
        "cluster.nodes",
        f"node {names} of {place.nodes} did not come; start it, and let it reach {place.master_addr}:{place.meeting_port}",
        f"{place.nodes} 个节点中的节点 {names} 未到达；请启动它，并确保能连到 {place.master_addr}:{place.meeting_port}",
    )

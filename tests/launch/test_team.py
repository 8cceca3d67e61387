"""Launchers that talk: met, gathered, told, lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.launch.node import free_port
from ascendfactory.launch.place import Place
from ascendfactory.launch.team import Lost, Message, Team


def on_nodes(num_nodes: int, work: Callable[[Team], Any], names: list[str] | None = None, meet_s: float = 20.0) -> list[Any]:
    """What `work` returns on each node, or the error that it, or the meeting, raised."""
    port = free_port()

    def node(rank: int) -> Any:
        try:
            team = Team(Place(rank, num_nodes, "127.0.0.1", port), (names or ["run"] * num_nodes)[rank], meet_s)
        except UserError as error:
            return error
        try:
            return work(team)
        except (Lost, UserError) as error:
            return error
        finally:
            team.close()

    with ThreadPoolExecutor(num_nodes) as pool:
        return list(pool.map(node, range(num_nodes)))


def test_a_node_alone_needs_no_network() -> None:
    team = Team(Place())
    assert team.gather({"a": 1}) == [{"a": 1}]
    team.tell({"kind": "step"})
    team.poll(lambda rank, message: pytest.fail("nobody is there"))
    team.close()


def test_every_node_gets_the_values_of_all_in_the_order_of_ranks() -> None:
    def work(team: Team) -> list[list[str]]:
        return [team.gather(f"{name}{team.place.rank}") for name in "abc"]

    assert on_nodes(3, work) == [[["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"]]] * 3


def test_words_reach_node_0_and_its_words_reach_all() -> None:
    def work(team: Team) -> list[tuple[int, str]]:
        heard: list[tuple[int, str]] = []

        def hear(rank: int, message: Message) -> None:
            heard.append((rank, message["text"]))

        team.tell({"kind": "word", "text": f"from {team.place.rank}"})
        team.gather(None, hear)  # whatever was said before has come
        return sorted(heard)

    assert on_nodes(3, work) == [[(1, "from 1"), (2, "from 2")], [(0, "from 0")], [(0, "from 0")]]


def test_a_lost_node_is_told_once_to_the_one_that_polls_and_ends_a_wait() -> None:
    gone = threading.Event()

    def work(team: Team) -> Any:
        team.gather(None)
        if team.place.rank == 1:
            team._links[0]._line.shutdown(socket.SHUT_RDWR)  # as when the machine stops
            gone.set()
            return None
        if team.place.rank == 2:
            return team.gather("never answered")
        gone.wait()
        found = []
        for _ in range(100):
            try:
                team.poll(lambda rank, message: None)
            except Lost as lost:
                found.append(lost.rank)
            if found:
                break
            threading.Event().wait(0.02)
        team.poll(lambda rank, message: None)
        with pytest.raises(Lost):
            team.gather("would wait for ever")
        return found

    first, _, third = on_nodes(3, work)
    assert first == [1]
    assert isinstance(third, Lost)
    assert third.rank == 0


def test_a_node_that_leaves_is_not_lost() -> None:
    def work(team: Team) -> Any:
        if team.place.rank == 1:
            return None
        for _ in range(20):
            team.poll(lambda rank, message: None)
            threading.Event().wait(0.02)
        return sorted(team.lost)

    assert on_nodes(2, work)[0] == []


def test_a_node_of_another_run_is_turned_away_and_the_right_one_still_comes() -> None:
    first, wrong = on_nodes(2, lambda team: team.gather(1), ["run-a", "run-b"], meet_s=1.0)
    assert isinstance(wrong, UserError)
    assert "'run-a' on 2 nodes, this one 'run-b' on 2" in wrong.en
    assert isinstance(first, UserError)
    assert first.en.startswith("node 1 of 2 did not come")


def test_no_node_0() -> None:
    with pytest.raises(UserError, match="node 0 does not answer"):
        Team(Place(1, 2, "127.0.0.1", free_port()), "run", meet_s=0.1)


def test_a_port_that_is_in_use_is_named_with_the_fix() -> None:
    port = free_port()
    with socket.create_server(("", port + 1)), pytest.raises(UserError) as refused:
        Team(Place(0, 2, "127.0.0.1", port), "run", meet_s=1)
    assert refused.value.where == f"port {port + 1}"
    assert "export MASTER_PORT=<another>" in refused.value.en

"""Where a node stands: told by the user, Slurm, Kubeflow or Volcano."""

from __future__ import annotations

import pytest

from ascendfactory.core.messages import UserError
from ascendfactory.launch.place import INTERFACE_VARIABLES, Place, expand_hosts, find_place, interface_env, interface_toward

SLURM = {"SLURM_NODEID": "2", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "gpu[08-10]"}
KUBEFLOW = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}
VOLCANO = {"VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job", "VC_WORKER_NUM": "2"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, Place(0, 1, "127.0.0.1", 29500)),
        ({"NNODES": "1", "NODE_RANK": "0", "MASTER_PORT": "6000"}, Place(0, 1, "127.0.0.1", 6000)),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}, Place(1, 2, "a", 7)),
        (SLURM, Place(2, 3, "gpu08", 29500)),
        (SLURM | {"MASTER_ADDR": "10.0.0.1"}, Place(2, 3, "10.0.0.1", 29500)),
        (SLURM | {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "b"}, Place(0, 2, "b", 29500)),  # what the user says goes first
        (KUBEFLOW, Place(3, 4, "job-node-0-0.job", 29400)),
        (VOLCANO, Place(1, 2, "job-worker-0.job", 29500)),
    ],
)
def test_who_starts_the_nodes_says_which_one_this_is(env: dict[str, str], place: Place) -> None:
    assert find_place(env) == place


def test_a_place_is_read_back_from_its_own_variables() -> None:
    place = Place(3, 5, "10.1.2.3", 1234)
    assert find_place(place.env()) == place
    assert place.meeting_port == 1235


@pytest.mark.parametrize(
    ("env", "where", "words"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR", "export MASTER_ADDR=..."),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK", "NNODES=2"),
        ({"NNODES": "two"}, "NNODES", "'two' is no number"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK", "2 is not below the number of nodes, 2"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "PET_MASTER_ADDR", "is not set"),
    ],
)
def test_half_a_place_is_refused(env: dict[str, str], where: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        find_place(env)
    assert refused.value.where == where
    assert words in refused.value.en


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r1n[098-101].site", ["r1n098.site", "r1n099.site", "r1n100.site", "r1n101.site"]),
    ],
)
def test_a_node_list_of_slurm_is_read_without_its_tools(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


def test_the_interface_is_that_toward_the_first_node_and_what_is_set_stays() -> None:
    assert interface_toward("127.0.0.1") == "lo"
    found = interface_env({"GLOO_SOCKET_IFNAME": "bond7"}, "127.0.0.1")
    assert found == dict.fromkeys(set(INTERFACE_VARIABLES) - {"GLOO_SOCKET_IFNAME"}, "lo")

"""Launchers of several nodes meet on loopback, each in a thread."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headway.errors import LaunchError
from headway.launch import nodes as nodes_module
from headway.launch.failure import RankError
from headway.launch.nodes import NodeSpec, Rendezvous, parse_master


@pytest.fixture(autouse=True)
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "LINGER_SECONDS", 1.0)
    monkeypatch.setattr(nodes_module, "REPORT_SECONDS", 0.5)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def together(*parts: Callable[[], Any]) -> list[Any]:
    """Run in threads; an error comes back as the result."""
    results: list[Any] = [None] * len(parts)

    def run(index: int) -> None:
        try:
            results[index] = parts[index]()
        except LaunchError as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def meet(num: int, rank: int, port: int, num_ranks: int, timeout: float = 20) -> Rendezvous:
    meeting = Rendezvous(NodeSpec(num, rank, "127.0.0.1", port, timeout), num_ranks)
    meeting.serve()
    try:
        meeting.gather()
    except LaunchError:
        meeting.leave(well=False)
        raise
    return meeting


def test_every_node_learns_where_its_ranks_begin() -> None:
    port = free_port()
    counts = (2, 1, 3)
    meetings = together(*(lambda node=node: meet(3, node, port, counts[node]) for node in range(3)))
    assert [(meeting.first_rank, meeting.world) for meeting in meetings] == [(0, 6), (2, 6), (3, 6)]
    lost = RankError("rank 0 lost its peer", 1, 5.0)
    meetings[0].announce(lost)
    meetings[2].announce(RankError("rank 4 was killed", 137, 0.0))
    assert [str(meeting.first_failure()) for meeting in meetings] == ["rank 4 was killed"] * 3
    assert str(meetings[0].first_cause(lost)) == "rank 4 was killed"
    assert meetings[0].first_cause(lost).exit_code == 137


def test_a_missing_node_is_named_on_every_node() -> None:
    port = free_port()
    errors = together(lambda: meet(4, 0, port, 1, 1.5), lambda: meet(4, 2, port, 1, 30))
    assert all(isinstance(error, LaunchError) for error in errors)
    assert "node ranks 1, 3 of 4 did not connect" in str(errors[0])
    assert "node ranks 1, 3 of 4 did not connect" in str(errors[1])


def test_a_missing_node_0_is_named() -> None:
    (error,) = together(lambda: meet(2, 1, free_port(), 1, 1.5))
    assert "node 0 is missing: no answer from 127.0.0.1" in str(error)


def test_two_nodes_of_the_same_rank_are_refused() -> None:
    port = free_port()
    answers = together(
        lambda: meet(3, 0, port, 1, 3),
        lambda: meet(3, 1, port, 1, 3),
        lambda: meet(3, 1, port, 1, 3),
    )
    assert sum("has that rank already" in str(answer) for answer in answers) == 1


def test_nodes_of_different_opinions_are_refused() -> None:
    port = free_port()
    answers = together(lambda: meet(2, 0, port, 1, 10), lambda: meet(3, 1, port, 1, 2))
    assert "--nnodes is 2; node 1 has 3" in str(answers[0])


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            LaunchError, match=r"node 0 cannot listen there: Address already in use"
        ):
            Rendezvous(NodeSpec(2, 0, "127.0.0.1", taken.getsockname()[1]), 1)


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:x", "host:70000"])
def test_a_wrong_master_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="must be HOST:PORT"):
        parse_master(text)


def test_wrong_numbers_of_nodes_are_refused() -> None:
    assert parse_master("[::1]:29500") == ("::1", 29500)
    with pytest.raises(LaunchError, match="it must be 0 to 1"):
        NodeSpec(2, 2, "h", 1)
    with pytest.raises(LaunchError, match="--master is missing"):
        NodeSpec(2, 0)
    with pytest.raises(LaunchError, match="--nnodes is 0"):
        NodeSpec(0)

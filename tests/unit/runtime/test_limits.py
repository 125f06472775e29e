"""Edges counted by hand: nodes of uneven worlds, half of a grace period, the memory of a container."""

import pytest

from headway.runtime import machine
from headway.runtime.process import Process, from_environment
from headway.runtime.stop import StopSignal


@pytest.mark.parametrize(
    ("world", "local", "rank", "node", "nodes"),
    [(10, 4, 9, 2, 3), (8, 4, 3, 0, 2), (9, 4, 8, 2, 3), (3, 4, 2, 0, 1)],
)
def test_a_last_node_with_fewer_ranks_is_counted(
    world: int, local: int, rank: int, node: int, nodes: int
) -> None:
    given = {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": world,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank % local,
    }
    environment = {
        name: str(value) for name, value in (given | {"OMPI_COMM_WORLD_LOCAL_SIZE": local}).items()
    }
    assert from_environment(environment) == Process(rank, rank % local, world, node, nodes)


def test_there_is_a_hurry_once_half_of_the_grace_period_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = StopSignal(grace_seconds=10.0)
    assert not stop.in_hurry(), "nobody has asked"
    stop.requested_at = 100.0
    seen = []
    for now in (100.0, 104.9, 105.1, 109.0, 120.0):
        monkeypatch.setattr("headway.runtime.stop.time.monotonic", lambda now=now: now)
        seen.append(stop.in_hurry())
    assert seen == [False, False, True, True, True]
    stop.grace_seconds = None
    assert not stop.in_hurry()


def test_a_process_may_use_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_group_limits", lambda *_: [(1 << 20, 3 << 18), (1 << 22, 0)])
    assert machine.ram_bytes() == (1 << 20, 1 << 18)
    monkeypatch.setattr(
        machine, "_group_limits", lambda *_: [(1 << 20, 1 << 21)]
    )  # more in use than allowed: nothing is left
    assert machine.ram_bytes() == (1 << 20, 0)

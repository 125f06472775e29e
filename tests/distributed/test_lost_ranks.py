"""When ranks lose each other, the error names who waited, in which exchange, and for whom; a crash is told once over all ranks."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.killed_runs import small, started
from support.ranks import start_processes
from support.runs import make_stores, write_recipe

from headway.errors import CommunicationError
from headway.runtime.heartbeat import Beat, suspects
from headway.train import train
from headway.train.config import Recipe
from headway.train.session import run_recipe


def disturbed(recipe: Recipe, rank: int, harm: Callable[[], None]) -> list[Any]:
    """Train on two ranks, one of which does something else after step 3; returns what each ended with."""

    @contextmanager
    def probe(run: Any) -> Iterator[None]:
        run.on_step(lambda step: harm() if step == 3 and run.process.rank == rank else None)
        yield

    def work() -> str:
        try:
            train(recipe, hook=probe)
        except CommunicationError as error:
            return str(error)
        except ValueError as error:
            return repr(error)
        return "done"

    return start_processes(work, 2)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, make_stores(tmp_path))


def test_a_rank_that_stops_is_named_with_the_exchange_the_other_waited_in(recipe: Path) -> None:
    plan = small(recipe, "late", "parallel.timeout_seconds=1.5", "checkpoint.every=null")
    said, _ = disturbed(plan, 1, lambda: time.sleep(3.5))
    assert (
        said.startswith("rank 0 waited ")
        and "in agreement of 2 ranks (exchange " in said
        and "step after step 3" in said
    ), said
    assert (
        "The others wait for rank 1" in said and "after step 3" in said.partition("The others")[2]
    ), said
    exchanges = json.loads((plan.run.folder / "logs" / "exchanges-rank-00000.json").read_text())
    assert exchanges[-1]["name"] == "agreement"
    assert len(exchanges) > 10


def test_a_rank_that_is_gone_is_named(recipe: Path) -> None:
    plan = small(recipe, "gone", "steps=100000")
    with started(plan, 2) as attempt:
        while not attempt.has_begun():
            time.sleep(0.01)
        attempt.ranks[1].kill()
        attempt.ranks[0].join(30)
        assert attempt.ranks[0].exitcode == 1
    said = (plan.run.folder.parent / "error-0.txt").read_text().splitlines()[-1]
    assert (
        "CommunicationError: rank 0 waited" in said and "Gone: rank 1" in said and "[/" not in said
    ), said


def test_a_rank_left_alone_at_the_start_ends_within_its_timeout(recipe: Path) -> None:
    plan = small(recipe, "alone", "parallel.timeout_seconds=1.5")
    plan.run.folder.parent.mkdir(parents=True)

    @contextmanager
    def killed(rank: int) -> Iterator[None]:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield

    begun = time.monotonic()
    with started(plan, 2, killed) as attempt:
        attempt.ranks[1].join(30)
        seconds = time.monotonic() - begun
        assert attempt.ranks[1].exitcode == 1
    # 1.5 for the wait, the rest for the start of the process.
    assert seconds < 3.5
    error = (plan.run.folder.parent / "error-1.txt").read_text().splitlines()[-1]
    assert error.startswith(
        "headway.errors.LaunchError: rank 1 of 2 could not connect to the other ranks within 2 s: "
        "rank 0 does not answer at 127.0.0.1:"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.1, 0.2, 0.4])
def test_a_rank_is_alone_wherever_in_its_start_rank_0_ends(recipe: Path, seconds: float) -> None:
    plan = small(recipe, "alone", "parallel.timeout_seconds=3", "steps=100000")
    plan.run.folder.parent.mkdir(parents=True)
    with started(plan, 2) as attempt:
        time.sleep(seconds)
        attempt.ranks[0].kill()
        killed_at = time.monotonic()
        attempt.ranks[1].join(30)
        assert attempt.ranks[1].exitcode == 1
    assert time.monotonic() - killed_at < 5
    error = (plan.run.folder.parent / "error-1.txt").read_text().splitlines()[-1]
    assert error.startswith(("headway.errors.LaunchError", "headway.errors.CommunicationError"))


def test_ranks_asked_to_stop_leave_alike_though_one_has_begun_its_loop_and_the_other_has_not(
    recipe: Path,
) -> None:
    plan = small(recipe, "asked")

    @contextmanager
    def probe(run: Any) -> Iterator[None]:
        run.session.stop.starting = run.process.rank == 0
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    assert [
        outcome["exit_code"] for outcome in start_processes(lambda: run_recipe(plan, hook=probe), 2)
    ] == [143, 143]


def test_a_crash_of_one_rank_is_told_once_with_its_traceback(recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "alerts.jsonl"
    script = tmp_path / "tell"
    script.write_text(f"#!/bin/sh\n(cat; echo) >> {target}\n")
    script.chmod(0o755)
    plan = small(
        recipe,
        "crashed",
        f"track=[{{kind: alert, form: command, command: [{script}], events: [crash]}}]",
    )

    def fail() -> None:
        raise ValueError("broken by the test")

    said = disturbed(plan, 1, fail)
    assert (
        said[1] == "ValueError('broken by the test')" and "Gone: rank 1" in said[0]
    ) or "waited" in said[0]
    (message,) = [json.loads(line) for line in target.read_text().splitlines()]
    assert message["event"] == "crash"
    assert message["text"].endswith("ValueError: broken by the test")
    assert "in fail" in message["text"]


def test_who_holds_the_others_up_is_who_is_in_no_exchange_or_behind() -> None:
    def beat(rank: int, collective: str | None, number: int) -> Beat:
        return Beat(rank, 1, "a", 3, "step", 0.0, 0.0, collective, number, 0.0)

    assert "rank 1 on a" in suspects([beat(0, "all_reduce", 7), beat(1, None, 6)], 1.0)
    assert "rank 0 on a" in suspects([beat(0, "all_reduce", 6), beat(1, "all_gather", 7)], 1.0)
    assert suspects([beat(0, "all_reduce", 7), beat(1, "all_reduce", 7)], 1.0) == ""

"""Runs that are disturbed at random moments: forked from a process that has everything loaded, killed, started again until they are done.

A rank notes where it is (start, step, validate, save) in shared memory, so that a drill can say what it hit.
"""

import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.config.load import load
from headway.train.config import Recipe
from headway.train.session import run_recipe
from support.foreground_signals import heed_signals
from support.ranks import free_port

OVERRIDES = (
    "model.hidden_size=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_size=16", "steps=14",
    "eval.every=3", "eval.rows=4", "checkpoint.every=2", "checkpoint.keep_last=2", "log.every=100", "parallel.timeout_seconds=20",
)  # fmt: skip
STEPS = 14
Around = Callable[[int], AbstractContextManager[Any]]
"""A rank's number -> what its process does before and after it trains."""
START_SECONDS = 30.0
SLOW_WRITE_SECONDS = 0.004
"""Added to every fsync, so that saves take a share of the time in which kills can hit them."""


@dataclass
class Attempt:
    """One start of a run: its ranks, and where each of them is."""

    ranks: list[Any]
    places: Any
    codes: list[int | None] = field(default_factory=list)

    def place(self, rank: int) -> str:
        return bytes(self.places[16 * rank : 16 * rank + 16]).rstrip(b"\0").decode() or "start"

    def is_alive(self) -> bool:
        return any(rank.is_alive() for rank in self.ranks)

    def has_begun(self) -> bool:
        return any(self.place(rank) != "start" for rank in range(len(self.ranks)))


def small(recipe: Path, name: str, *overrides: str) -> Recipe:
    """The smallest run that has validation, checkpoints and several epochs."""
    return load(Recipe, recipe, [*OVERRIDES, f"run.name={name}", *overrides])


@contextmanager
def started(recipe: Recipe, world: int, around: Around = nullcontext) -> Iterator[Attempt]:
    """Start a run; whatever is left of it at the end is killed. `around` is entered in the process of each rank."""
    context = multiprocessing.get_context("fork")
    places = context.Array("c", 16 * world, lock=False)
    port = free_port()
    attempt = Attempt(
        [
            context.Process(target=_rank, args=(recipe, rank, world, port, places, around))
            for rank in range(world)
        ],
        places,
    )
    for rank in attempt.ranks:
        rank.start()
    try:
        yield attempt
    finally:
        for rank in attempt.ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
        attempt.codes = [rank.exitcode for rank in attempt.ranks]


def finish(
    recipe: Recipe, world: int, timeout: float = 120.0, around: Around = nullcontext
) -> list[int | None]:
    """Run to the end, its own or that of a rank; returns the exit codes."""
    with started(recipe, world, around) as attempt:
        end = time.monotonic() + timeout
        while (
            attempt.is_alive()
            and time.monotonic() < end
            and not any(rank.exitcode not in (None, 0) for rank in attempt.ranks)
        ):
            time.sleep(0.005)
    return attempt.codes


def kill_somewhere(recipe: Recipe, world: int, draw: random.Random) -> str | None:
    """Start, and kill a random rank with SIGKILL: at any moment, in a save, in a validation or at the start. None if it was done first."""
    wanted = draw.choice(("any", "any", "save", "validate", "start"))
    victim = draw.randrange(world)
    after = draw.uniform(0, 0.5)
    patience = draw.randrange(1, 5)
    with started(recipe, world) as attempt:
        begun = time.monotonic()
        hits = 0
        inside = False
        while attempt.is_alive():
            now = time.monotonic()
            place_now = attempt.place(victim)
            if wanted == "start":
                due = now - begun > after
            elif wanted == "any":
                due = attempt.has_begun() and now - begun > after + 0.2
            else:
                hits += place_now == wanted and not inside
                inside = place_now == wanted
                due = hits >= patience and inside
            if due:
                attempt.ranks[victim].kill()
                attempt.ranks[victim].join()
                _wait_for_others(attempt, draw.uniform(0, 0.1))
                return attempt.place(victim)
            assert now - begun < START_SECONDS + 60, "the run hangs"
            time.sleep(0.001)
    return None


def _wait_for_others(attempt: Attempt, seconds: float) -> None:
    """The others live a little longer than the victim, as they do when one machine dies."""
    end = time.monotonic() + seconds
    while attempt.is_alive() and time.monotonic() < end:
        time.sleep(0.001)


def _rank(recipe: Recipe, rank: int, world: int, port: int, places: Any, around: Around) -> None:
    import torch

    torch.set_num_threads(1)
    if world > 1:
        here = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_PORT": port,
        }
        os.environ.update(
            MASTER_ADDR="127.0.0.1", **{name: str(value) for name, value in here.items()}
        )
    plain = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(SLOW_WRITE_SECONDS)
        plain(descriptor)

    os.fsync = slow  # pyright: ignore[reportAttributeAccessIssue]
    heed_signals()
    try:
        with around(rank):
            outcome = run_recipe(recipe, hook=lambda run: _noting(run, places, rank))
        os._exit(outcome.get("exit_code", 0))
    except BaseException:
        (recipe.run.folder.parent / f"error-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)


@contextmanager
def _noting(run: Any, places: Any, rank: int) -> Iterator[None]:
    """Copy the heartbeat's phase into shared memory as soon as it changes; a save beside training counts as one."""
    plain = run.heart.beat
    work = run.saver._work

    def note(phase: str) -> None:
        places[16 * rank : 16 * rank + 16] = phase.encode().ljust(16, b"\0")

    def beat(phase: str, step: int) -> None:
        plain(phase, step)
        note(phase)

    def saving(*arguments: Any) -> None:
        note("save")
        work(*arguments)
        note("step")

    run.heart.beat = beat
    run.saver._work = saving
    beat("step", run.state.step)
    yield

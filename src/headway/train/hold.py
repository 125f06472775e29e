"""A run's folders belong to one job: its first rank takes their locks before anything there is read or changed, for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.parallel.collectives import RankGroup
from headway.runtime.run_lock import RunLock
from headway.train.config import Recipe
from headway.train.folder import first_decides
from headway.train.saved import refuse_dangling


class Hold:
    """The locks this process has for its job: those of the run folder and of a checkpoint folder elsewhere; none on other ranks."""

    def __init__(self, locks: Sequence[RunLock] = ()) -> None:
        self.locks = list(locks)

    def moved(self) -> None:
        """The run folder was set aside with its lock in it."""
        if self.locks:
            self.locks[0].moved()

    def check(self) -> None:
        """Refuse to go on where somebody else has taken over."""
        for lock in self.locks:
            lock.check()


@contextmanager
def held(recipe: Recipe, world: RankGroup) -> Iterator[Hold]:
    """Take the locks of a run, or refuse on all ranks with who has them."""
    folder = recipe.run.folder
    checkpoints, _ = recipe.checkpoint.locations(folder)
    places = [folder] if checkpoints.is_relative_to(folder) else [folder, checkpoints]
    hold = Hold()

    def take() -> dict[str, Any]:
        refuse_dangling([recipe.run.dir, *places, checkpoints])
        for place in places:
            lock = RunLock(place, recipe.run.takeover_seconds)
            hold.locks.append(lock)
            lock.take()
        return {}

    try:
        first_decides(world, take)
        yield hold
    finally:
        for lock in reversed(hold.locks):
            lock.release()

"""What the ranks of a run agree on between two steps: go on, save, stop, go back or give up. One exchange of four numbers."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from headway.parallel.collectives import RankGroup
from headway.runtime.stop import StopSignal
from headway.train.request import Mailbox

REQUEST = "headway stop"
SAVE, LEAVE = 1, 2


@dataclass(frozen=True)
class Order:
    """The same on every rank."""

    stopped_by: str | None = None
    """A signal any rank got, or REQUEST."""
    save: bool = False
    bad_step: int | None = None
    """A step that is to be undone."""
    is_hopeless: bool = False
    """The run should end: healing does not help."""


class Orders:
    """Asks all ranks, between steps."""

    def __init__(self, world: RankGroup, run_dir: Path, stop: StopSignal, steps_before: int = 0) -> None:
        self.world, self.stop, self.steps_before = world, stop, steps_before
        self.mailbox = Mailbox(run_dir) if world.rank == 0 else None

    def look(self, step: int, bad_step: int | None = None, *, is_hopeless: bool = False) -> Order:
        """What to do after this step."""
        asked = self.mailbox.due(self.steps_before + step) if self.mailbox is not None else None
        mine = [
            0 if self.stop.requested is None else signal.Signals[self.stop.requested].value,
            0 if asked is None else SAVE if asked.save_only else LEAVE,
            0 if bad_step is None else bad_step,
            int(is_hopeless),
        ]
        number, wish, bad, hopeless = self.world.max_each(mine)
        if asked is not None and self.mailbox is not None:
            self.mailbox.heeded()
        stopped_by = signal.Signals(number).name if number else REQUEST if wish == LEAVE else None
        return Order(stopped_by, wish == SAVE, bad or None, bool(hopeless))

    def in_hurry(self) -> bool:
        """Whether any rank has little time left to save."""
        return bool(self.world.max(int(self.stop.in_hurry())))


def exit_code(stopped_by: str) -> int:
    """As launchers know it: 128 and the signal's number; a request counts as SIGTERM."""
    return 128 + (signal.SIGTERM if stopped_by == REQUEST else signal.Signals[stopped_by].value)

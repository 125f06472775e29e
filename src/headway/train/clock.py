"""Wall time of a run over all its starts, and of its epochs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.train.build import Run

log = logging.getLogger("headway")


class Clock:
    """Wall time of a run over all its starts, and of its epochs."""

    def __init__(self, run: Run) -> None:
        self.run, self.before, self.epoch = run, run.state.seconds, run.state.epoch
        self.began = self.epoch_began = time.perf_counter()

    def seconds(self) -> float:
        """Training time so far."""
        return self.before + time.perf_counter() - self.began

    def epoch_lines(self) -> None:
        """Say when a pass over the data is complete."""
        if self.run.state.epoch > self.epoch:
            now = time.perf_counter()
            log.info("epoch %d completed in %.1f s", self.run.state.epoch, now - self.epoch_began)
            self.epoch, self.epoch_began = self.run.state.epoch, now

"""The time a run has trained. In: the saved state and the time of day; out: seconds over all starts of the run, and of each epoch."""

from __future__ import annotations

import logging
import time

from headway.train.state import TrainState

log = logging.getLogger("headway")


class Clock:
    """Training time over all starts of a run."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.start()

    def start(self) -> None:
        """Count from now on."""
        self._before, self._epoch = self.state.seconds, self.state.epoch
        self._began = self._epoch_began = time.perf_counter()

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def log_epoch(self) -> None:
        """Log the time of an epoch once it is complete."""
        if self.state.epoch > self._epoch:
            now = time.perf_counter()
            log.info("epoch %d completed in %.1f s", self.state.epoch, now - self._epoch_began)
            self._epoch, self._epoch_began = self.state.epoch, now

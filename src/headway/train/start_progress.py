"""What a start is doing, every few seconds, until the first step is over.

In: the name of each piece of work and how much of it is done; out: lines of the log.

    validation before training: 3/4 microbatches, 12s so far, about 4s left
    first step: 1/8 microbatches, 6s so far, about 42s left

A piece of work that is over before the first line is due says nothing. A thread writes the lines,
because one microbatch of a large model on a CPU takes longer than a person waits for a sign.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headway.data.batch import Batch
from headway.runtime.progress import duration, quantity

log = logging.getLogger("headway")

LINE_EVERY_SECONDS = 5.0
MICROBATCHES = "microbatches"


@dataclass
class StartProgress:
    """The work at hand. `open` starts the lines, `close` ends them."""

    clock: Callable[[], float] = time.monotonic
    every_seconds: float = LINE_EVERY_SECONDS
    is_open: bool = field(default=False, init=False)
    _label: str = field(default="", init=False)
    _total: float | None = field(default=None, init=False)
    _unit: str = field(default="", init=False)
    _done: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)
    _seconds_of_done: float = field(default=0.0, init=False)
    """How long that which is done took."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def open(self) -> None:
        """Write lines from now on."""
        self.is_open = True
        threading.Thread(target=self._write_lines, name="start-progress", daemon=True).start()

    def close(self) -> None:
        """Write no more lines."""
        self.is_open = False
        self._over.set()

    def begin(self, label: str, total: float | None = None, unit: str = "") -> None:
        """Another piece of work begins; `total` is its size where that is known."""
        with self._lock:
            self._label = label
            self._total = total
            self._unit = unit
            self._done = 0.0
            self._seconds_of_done = 0.0
            self._began = self.clock()

    def advance(self, amount: float = 1) -> None:
        """So much of it is done."""
        with self._lock:
            self._done += amount
            self._seconds_of_done = self.clock() - self._began

    def counted(self, microbatches: tuple[Batch, ...]) -> tuple[Batch, ...]:
        """The microbatches of the first step; to iterate over them counts those that are done."""
        if not self.is_open:
            return microbatches
        self.begin("first step", len(microbatches), MICROBATCHES)
        counted = _Counted(microbatches)
        counted.advance = self.advance
        return counted

    def line(self) -> str | None:
        """The line of this moment; None before the work has lasted for a while."""
        with self._lock:
            passed = self.clock() - self._began
            if not self._label or passed < self.every_seconds:
                return None
            text = f"{self._label}: "
            # An engine may take all microbatches first, or be ahead of a GPU: when everything is
            # taken, only the time is known.
            is_counted = self._total is not None and 0 < self._done < self._total
            if self._total is not None and self._done < self._total:
                text += f"{quantity(self._done)}/{quantity(self._total, self._unit)}, "
            text += f"{duration(passed)} so far"
            if is_counted and self._total is not None:
                # The microbatch at hand has taken some of its time already.
                expected = self._total * self._seconds_of_done / self._done
                if expected > passed:
                    text += f", about {duration(expected - passed)} left"
            return text

    def _write_lines(self) -> None:
        while not self._over.wait(self.every_seconds):
            line = self.line()
            if line is not None:
                log.info("%s", line)


class _Counted(tuple[Batch, ...]):
    """Microbatches that report when the next one is asked for."""

    advance: Callable[[float], None]

    def __iter__(self) -> Iterator[Batch]:
        for microbatch in super().__iter__():
            yield microbatch
            self.advance(1)

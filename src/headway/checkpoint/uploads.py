"""Checkpoints go to a store in a thread of their own, one at a time; a slow store delays no save.

    saved:   10 ──▶ 20 ──▶ 30 ──▶ 40              each is whole on the disk before it is put here
    sent:    10 ───────────────▶ 40 ──▶           what waits is replaced by what is newer: 20 and 30 are never sent

Only names wait. All ranks put the same names in the same order; the first one decides which is sent next, over a group of ranks that
nothing else uses.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from headway.checkpoint.save import ALONE, Writers
from headway.errors import CheckpointError

log = logging.getLogger("headway")


class Uploads:
    """Sends checkpoints by name."""

    def __init__(self, send: Callable[[str], None], report: Callable[[str, CheckpointError, int], None], writers: Writers = ALONE) -> None:
        self._send, self._report, self.writers = send, report, writers
        self.hurry: Callable[[bool], None] = lambda on: None
        """Called with whether a newer checkpoint waits, so that a store that is down is not asked for long about an older one."""
        self.failed: CheckpointError | None = None
        """Why the newest upload failed; None once one succeeds."""
        self.bug: BaseException | None = None
        self._failures = 0
        self._turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._newest: str | None = None
        """What is to be sent next."""
        self._current: str | None = None
        self._left = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way or waits."""
        return self._left > 0

    @property
    def names(self) -> set[str]:
        """What must stay on the disk until it is sent."""
        with self._changed:
            return {name for name in (self._current, self._newest) if name is not None}

    def put(self, name: str) -> None:
        """Send a checkpoint as soon as the one under way is done, unless a newer one comes before that."""
        with self._changed:
            self._newest = name
            self._left += 1
            if self._current is not None:
                self.hurry(True)
        self._turns.put(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-upload", daemon=True)
            self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is under way; returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, seconds)

    def leave(self) -> None:
        """The run stops without the rest: nobody waits for it any more, and the next start sends it."""
        with self._changed:
            self.failed, self._left = None, 0

    def _work(self) -> None:
        while True:
            self._turns.get()
            try:
                self._turn()
            except BaseException as bug:  # raised in the main thread by the saver
                self.bug = bug
            with self._changed:
                self._current = None
                self._left = max(0, self._left - 1)
                self._changed.notify_all()

    def _turn(self) -> None:
        """One for each name that was put, on every rank; nothing is to do where a newer one was sent in its place."""
        with self._changed:
            self._current, self._newest = self._newest, None
            self.hurry(False)
        name = self.writers.gather(self._current)[0]
        if name is None:
            return
        with self._changed:
            self._current = name
        try:
            self._send(name)
            self.failed, self._failures = None, 0
        except CheckpointError as problem:
            self.failed = problem
            self._failures += 1
            self._report(name, problem, self._failures)

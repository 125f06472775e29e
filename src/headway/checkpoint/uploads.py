"""Uploads to an object store: one thread sends checkpoints one at a time, so that a slow store delays no save.

    saved:   10 ──▶ 20 ──▶ 30 ──▶ 40              each is complete on disk before it is put here
    sent:    10 ───────────────▶ 40 ──▶           a newer checkpoint replaces a waiting one: 20 and 30 are never sent

Only names wait. All ranks put the same names in the same order; rank 0 decides which is sent next, over a process group used by nothing
else.
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

    def __init__(
        self,
        send: Callable[[str], None],
        report: Callable[[str, CheckpointError, int], None],
        writers: Writers = ALONE,
    ) -> None:
        self._send, self._report, self.writers = send, report, writers
        self.hurry: Callable[[bool], None] = lambda on: None
        """Called with whether a newer checkpoint waits; then calls to a store that is down are not retried for long."""
        self.failed: CheckpointError | None = None
        """Why the newest upload failed; None once one succeeds."""
        self.bug: BaseException | None = None
        self._failures = 0
        self._turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._newest: str | None = None
        """Sent next."""
        self._current: str | None = None
        self._left = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an upload is running or waiting."""
        return self._left > 0

    @property
    def names(self) -> set[str]:
        """Checkpoints that must stay on disk until they are sent."""
        with self._changed:
            return {name for name in (self._current, self._newest) if name is not None}

    def put(self, name: str) -> None:
        """Send a checkpoint after the running upload, unless a newer one replaces it before that."""
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
        """Wait for all uploads; returns whether they are done."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, seconds)

    def leave(self) -> None:
        """Stop waiting for unfinished uploads; the next start sends them."""
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
        """One turn per name, on every rank. A turn is empty if a newer checkpoint was sent instead."""
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

"""Uploads to an object store: one thread sends checkpoints one at a time, so that a slow store
delays no save.

    saved:   10 ──▶ 20 ──▶ 30 ──▶ 40              each is complete on disk before it is put here
    sent:    10 ───────────────▶ 40 ──▶           40 replaces 20 and 30, which are never sent

Only names wait. All ranks put the same names in the same order; rank 0 decides which is sent next,
over a process group used by nothing else.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from headway.checkpoint.save import ALONE, Writers
from headway.errors import CheckpointError


class Uploads:
    """Sends checkpoints by name."""

    def __init__(
        self,
        send: Callable[[str], None],
        report: Callable[[str, CheckpointError, int], None],
        writers: Writers = ALONE,
    ) -> None:
        self._send = send
        self._report = report
        self.writers = writers
        self.hurry: Callable[[bool], None] = lambda on: None
        """Called with whether a newer checkpoint waits.

        Then calls to a store that is down are not retried for long.
        """
        self.failed: CheckpointError | None = None
        """Why the newest upload failed; None once one succeeds."""
        self.bug: BaseException | None = None
        """An unexpected exception of the thread, which the saver raises in the main thread."""
        self._failures = 0
        """Uploads in a row that failed."""

        # One entry per `put`, the same on every rank. The thread takes an entry as the signal for
        # one turn, not as the name to send: that is `_newest` of rank 0 at that moment.
        self._turns: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._newest: str | None = None
        """Sent next."""
        self._current: str | None = None
        """Being sent."""
        self._turns_left = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an upload is running or waiting."""
        return self._turns_left > 0

    @property
    def names(self) -> set[str]:
        """Checkpoints that must stay on disk until they are sent."""
        with self._changed:
            return {name for name in (self._current, self._newest) if name is not None}

    def put(self, name: str) -> None:
        """Send a checkpoint after the running upload, unless a newer one replaces it first."""
        with self._changed:
            self._newest = name
            self._turns_left += 1
            if self._current is not None:
                self.hurry(True)
        self._turns.put(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="headway-upload", daemon=True)
            self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for all uploads; returns whether they are done."""
        with self._changed:
            return self._changed.wait_for(lambda: self._turns_left == 0, seconds)

    def leave(self) -> None:
        """Stop waiting for unfinished uploads; the next start sends them."""
        with self._changed:
            self.failed = None
            self._turns_left = 0

    def _work(self) -> None:
        while True:
            self._turns.get()
            try:
                self._turn()
            except BaseException as bug:  # raised in the main thread by the saver
                self.bug = bug
            with self._changed:
                self._current = None
                # `leave` may have set it to 0 while this turn was running.
                self._turns_left = max(0, self._turns_left - 1)
                self._changed.notify_all()

    def _turn(self) -> None:
        """One turn per name, on every rank.

        A turn is empty if a newer checkpoint was sent instead.
        """
        with self._changed:
            self._current = self._newest
            self._newest = None
            self.hurry(False)

        # Ranks save at slightly different moments, so their newest names may differ: rank 0's wins.
        name = self.writers.gather(self._current)[0]
        if name is None:
            return

        with self._changed:
            self._current = name

        try:
            self._send(name)
            self.failed = None
            self._failures = 0
        except CheckpointError as problem:
            self.failed = problem
            self._failures += 1
            self._report(name, problem, self._failures)

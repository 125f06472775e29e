"""Callbacks: a user's code that follows a run.

In: the records of metrics.jsonl, saves and the end. Out: calls of `Callback` methods.

Each callback has a thread and a bounded queue, so that it can neither slow nor break a run. Its
numbers are host values that are there already; nothing waits for the device. One that raises, or
does not return, is reported once and not called again.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.errors import first_line

log = logging.getLogger("headway")

MAX_QUEUED = 1000
"""Calls that may wait for a slow callback."""
HANG_SECONDS = 60.0
"""A call that takes longer hangs."""
END_SECONDS = 10.0
"""How long the end of a run waits for its callbacks."""


class Callback:
    """Follows a run.

    Derive from it and define the methods you need; they are called on the first rank, in a thread
    of their own.

    Methods are called in order and one at a time. If they take longer than the steps, the oldest
    waiting `on_step` calls are left out. A callback that raises, or takes more than 60 s for one
    call, is reported (event `callback`) and not called again; training continues.

    Example:
        >>> class Show(hw.Callback):
        ...     def on_validate(self, step, metrics):
        ...         print(step, metrics["valid"]["loss"])
        >>> hw.train(recipe, callbacks=[Show()])
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After each step: its record in metrics.jsonl.

        It arrives a few steps late, because nothing waits for the device.
        """

    def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        """After each validation: the numbers of each validation set.

        The set of `data.valid.fraction` is called valid.
        """

    def on_save(self, step: int, path: Path) -> None:
        """After each checkpoint that is complete: its folder."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Once, when the run ends or is stopped: its summary.

        After an error it has the key `error`.
        """


class CallbackThreads:
    """The callbacks of one call of `train`, each with its thread.

    Ranks other than the first have none.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        *,
        hang_seconds: float = HANG_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        self.hang_seconds = hang_seconds
        self.end_seconds = end_seconds
        self.summary: Mapping[str, Any] = {}
        """What `on_end` receives."""
        self.report: Callable[[str], object] = lambda text: log.warning("%s", text)
        """Called with a message when a callback is dropped, from any thread; the run replaces it.
        """
        # A lambda, so that workers use the `report` of the moment, not the one above.
        self._workers = [
            _Worker(callback, lambda text: self.report(text)) for callback in callbacks
        ]

    def record(self, record: Mapping[str, Any], at_start: str = "") -> None:
        """Pass on the record of a step. Returns at once.

        `at_start` is the key under which the record of the first step has the validation before
        training.
        """
        if not self._workers:
            return
        # A callback may change what it gets: the run's record stays as it is. All callbacks get the
        # same copy.
        copied = copy.deepcopy(dict(record))
        step = int(copied["step"])
        for worker in self._workers:
            # A thread cannot be ended. One that hangs is left alone and gets no more calls.
            if worker.busy_seconds() > self.hang_seconds:
                worker.drop(f"has not returned from {worker.method} for {self.hang_seconds:g} s")
            # That validation was of the model before this step.
            if at_start in copied:
                worker.put("on_validate", step - 1, copied[at_start])
            worker.put("on_step", step, copied)
            if "valid" in copied:
                worker.put("on_validate", step, copied["valid"])

    def saved(self, step: int, path: Path) -> None:
        """Pass on a save. Called from any thread; returns at once."""
        for worker in self._workers:
            worker.put("on_save", step, path)

    def close(self) -> None:
        """Call `on_end`, and wait a little for the calls that are left."""
        for worker in self._workers:
            worker.put("on_end", self.summary)
            worker.end()

        # One deadline for all of them together.
        deadline = time.monotonic() + self.end_seconds
        for worker in self._workers:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
            if worker.thread.is_alive():
                worker.drop(
                    f"has not returned from {worker.method} at the end of the run, after "
                    f"{self.end_seconds:g} s"
                )


class _Worker:
    """One callback, its queue and its thread."""

    def __init__(self, callback: Callback, report: Callable[[str], object]) -> None:
        self.callback = callback
        self.report = report
        self.name = f"{type(callback).__module__}.{type(callback).__qualname__}"
        self.method = ""
        """The method that is running, or ran last."""
        self._since: float | None = None
        """When the call in progress began; None between calls."""
        self._queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._change = threading.Condition()
        self._ends = False
        """No further calls come: the thread ends when the queue is empty."""
        self._dropped = False
        """It failed or hangs: the thread makes no further call."""
        self.thread = threading.Thread(
            target=self._run, name=f"headway-callback-{type(callback).__name__}", daemon=True
        )
        self.thread.start()

    def put(self, method: str, *arguments: Any) -> None:
        """Queue a call; never waits."""
        # A method that this callback does not define needs no call.
        if getattr(type(self.callback), method) is getattr(Callback, method):
            return
        with self._change:
            if self._dropped:
                return
            # Steps are many, and one of them matters little; saves and validations are few, and
            # stay.
            if len(self._queue) >= MAX_QUEUED:
                methods = [name for name, _ in self._queue]
                oldest = methods.index("on_step") if "on_step" in methods else 0
                del self._queue[oldest]
            self._queue.append((method, arguments))
            self._change.notify()

    def end(self) -> None:
        """No further calls come."""
        with self._change:
            self._ends = True
            self._change.notify()

    def busy_seconds(self) -> float:
        """How long the call in progress takes already."""
        since = self._since
        if since is None or self._dropped:
            return 0.0
        return time.monotonic() - since

    def drop(self, why: str) -> None:
        """Report once, and call it no more."""
        with self._change:
            if self._dropped:
                return
            self._dropped = True
            self._queue.clear()
            self._change.notify()
        # Outside of the lock: the report may call other code.
        self.report(f"callback {self.name} {why}; it is not called again, and training continues")

    def _run(self) -> None:
        """The thread: one call after the other, until the end or the first failure."""
        while True:
            with self._change:
                while not self._queue and not self._ends and not self._dropped:
                    self._change.wait()
                # An empty queue here means the end.
                if self._dropped or not self._queue:
                    return
                self.method, arguments = self._queue.popleft()
                self._since = time.monotonic()
            try:
                getattr(self.callback, self.method)(*arguments)
            except BaseException as error:
                # A user's code may raise anything, SystemExit too.
                log.debug("callback %s", self.name, exc_info=True)
                self.drop(f"failed in {self.method}: {type(error).__name__}: {first_line(error)}")
                return
            finally:
                self._since = None

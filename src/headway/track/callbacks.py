"""Callbacks: a user's code that follows a run. In: the records of metrics.jsonl, saves and the end. Out: calls of `Callback` methods.

Each callback has a thread and a bounded queue, so that it can neither slow nor break a run. Its numbers are host values that are there
already; nothing waits for the device. One that raises, or does not return, is reported once and not called again.
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
HANG_SECONDS = 60.0
"""A call that takes longer hangs."""
END_SECONDS = 10.0
"""How long the end of a run waits for its callbacks."""


class Callback:
    """Follows a run. Derive from it and define the methods you need; they are called on the first rank, in a thread of their own.

    Methods are called in order and one at a time. If they take longer than the steps, the oldest waiting `on_step` calls are left out.
    A callback that raises, or takes more than 60 s for one call, is reported (event `callback`) and not called again; training continues.

    Example:
        >>> class Show(hw.Callback):
        ...     def on_validate(self, step, metrics):
        ...         print(step, metrics["valid"]["loss"])
        >>> hw.train(recipe, callbacks=[Show()])
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After each step: its record in metrics.jsonl. It arrives a few steps late, because nothing waits for the device."""

    def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        """After each validation: the numbers of each validation set. The set of `data.valid.fraction` is called valid."""

    def on_save(self, step: int, path: Path) -> None:
        """After each checkpoint that is complete: its folder."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Once, when the run ends or is stopped: its summary; after an error it has the key `error`."""


class CallbackThreads:
    """The callbacks of one call of `train`, each with its thread; none on other ranks than the first."""

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        *,
        hang_seconds: float = HANG_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        self.hang_seconds, self.end_seconds = hang_seconds, end_seconds
        self.summary: Mapping[str, Any] = {}
        """What `on_end` receives."""
        self.report: Callable[[str], object] = lambda text: log.warning("%s", text)
        self._workers = [
            _Worker(callback, lambda text: self.report(text)) for callback in callbacks
        ]

    def record(self, record: Mapping[str, Any], at_start: str = "") -> None:
        """Pass on the record of a step; `at_start` is the key of a validation before it. Returns at once."""
        if not self._workers:
            return
        own = copy.deepcopy(dict(record))  # a callback may change what it gets
        step = int(own["step"])
        for worker in self._workers:
            if worker.busy_seconds() > self.hang_seconds:
                worker.drop(f"has not returned from {worker.method} for {self.hang_seconds:g} s")
            if at_start in own:
                worker.put("on_validate", step - 1, own[at_start])
            worker.put("on_step", step, own)
            if "valid" in own:
                worker.put("on_validate", step, own["valid"])

    def saved(self, step: int, path: Path) -> None:
        """Pass on a save. Called from any thread; returns at once."""
        for worker in self._workers:
            worker.put("on_save", step, path)

    def close(self) -> None:
        """Call `on_end`, and wait a little for the calls that are left."""
        for worker in self._workers:
            worker.put("on_end", self.summary)
            worker.end()
        end = time.monotonic() + self.end_seconds
        for worker in self._workers:
            worker.thread.join(max(0.0, end - time.monotonic()))
            if worker.thread.is_alive():
                worker.drop(
                    f"has not returned from {worker.method} at the end of the run, after {self.end_seconds:g} s"
                )


class _Worker:
    """One callback, its queue and its thread."""

    def __init__(self, callback: Callback, report: Callable[[str], object]) -> None:
        self.callback, self.report = callback, report
        self.name = f"{type(callback).__module__}.{type(callback).__qualname__}"
        self.method = ""
        self._since: float | None = None
        self._queue: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._change = threading.Condition()
        self._ends = self._dropped = False
        self.thread = threading.Thread(
            target=self._run, name=f"headway-callback-{type(callback).__name__}", daemon=True
        )
        self.thread.start()

    def put(self, method: str, *given: Any) -> None:
        if method in ("on_step", "on_validate", "on_save", "on_end") and getattr(
            type(self.callback), method
        ) is getattr(Callback, method):
            return  # not defined by this callback
        with self._change:
            if self._dropped:
                return
            if len(self._queue) >= MAX_QUEUED:
                oldest = next(
                    (at for at, (name, _) in enumerate(self._queue) if name == "on_step"), 0
                )
                del self._queue[oldest]
            self._queue.append((method, given))
            self._change.notify()

    def end(self) -> None:
        """No further calls come."""
        with self._change:
            self._ends = True
            self._change.notify()

    def busy_seconds(self) -> float:
        """How long the call in progress takes already."""
        since = self._since
        return 0.0 if since is None or self._dropped else time.monotonic() - since

    def drop(self, why: str) -> None:
        """Report once, and call it no more."""
        with self._change:
            if self._dropped:
                return
            self._dropped = True
            self._queue.clear()
            self._change.notify()
        self.report(f"callback {self.name} {why}; it is not called again, and training continues")

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._queue and not self._ends and not self._dropped:
                    self._change.wait()
                if self._dropped or not self._queue:
                    return
                self.method, given = self._queue.popleft()
                self._since = time.monotonic()
            try:
                getattr(self.callback, self.method)(*given)
            except BaseException as error:  # a user's code may raise anything, SystemExit too
                log.debug("callback %s", self.name, exc_info=True)
                self.drop(f"failed in {self.method}: {type(error).__name__}: {first_line(error)}")
                return
            finally:
                self._since = None

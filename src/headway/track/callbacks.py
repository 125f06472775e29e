"""Callbacks: a user's code that follows a run, and may act on it.

In: the records of metrics.jsonl, saves and the end. Out: calls of `Callback` methods, and what they
request through `self.control` (`CallbackControl`).

    in the loop        the default: called between steps, before the record is written. One that
                       raises ends the run.
    background = True  a thread and a bounded queue each, so that it can neither slow nor break a
                       run. One that raises, or does not return, is reported once and not called
                       again.

The numbers are host values that are there already; nothing waits for the device. Callbacks exist on
the first rank alone. `train/run.py` passes their requests on to all ranks.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from headway.errors import ConfigError, first_line

log = logging.getLogger("headway")

MAX_QUEUED = 1000
"""Calls that may wait for a slow callback."""
HANG_SECONDS = 60.0
"""A call that takes longer hangs."""
END_SECONDS = 10.0
"""How long the end of a run waits for its callbacks."""


@dataclass(frozen=True)
class CallbackRequests:
    """What callbacks have requested since the last time; plain Python, so that ranks exchange it."""

    stop: str | None = None
    """Why the run is to end; None = it continues."""
    save: bool = False
    lr_scale: float | None = None
    """The new factor of all learning rates; None = unchanged."""
    error: str | None = None
    """What a callback failed with, in one line."""


class CallbackControl:
    """What a callback may do to its run: `self.control` of a `Callback`.

    Each request takes effect before the next step, on all ranks. Callable from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lr_scale = 1.0
        self._requests = CallbackRequests()
        self._metrics: dict[str, float | int] = {}
        self._names_in_use: frozenset[str] = frozenset()

    def stop(self, reason: str = "a callback requested it") -> None:
        """End the run, as `eval.stop` does: a checkpoint, `final/` and the summary are written."""
        with self._lock:
            self._requests = replace(self._requests, stop=str(reason))

    def save(self) -> None:
        """Save a checkpoint, then continue."""
        with self._lock:
            self._requests = replace(self._requests, save=True)

    @property
    def lr_scale(self) -> float:
        """All learning rates of the schedule are multiplied by this; 1 at first.

        It is part of a checkpoint: a resumed run continues with it.
        """
        with self._lock:
            if self._requests.lr_scale is not None:
                return self._requests.lr_scale
            return self._lr_scale

    @lr_scale.setter
    def lr_scale(self, scale: float) -> None:
        if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale >= 0):
            raise ConfigError(
                f"control.lr_scale is {scale!r}; it must be a number that is not negative: 0.5 "
                "halves all learning rates."
            )
        with self._lock:
            self._requests = replace(self._requests, lr_scale=float(scale))

    def add_metric(self, name: str, value: float) -> None:
        """Add a number to the record of this step: metrics.jsonl, console, trackers and board.

        Outside of `on_step` and `on_validate` it is added to the next record.
        """
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"add_metric has the name {name!r}; it must be a text.")
        if name in self._names_in_use:
            raise ConfigError(
                f"add_metric has the name {name!r}, which the run itself writes; choose another."
            )
        number: float | int
        if isinstance(value, int):
            number = int(value)
        else:
            try:
                number = float(value)  # numbers of numpy and torch, too
            except (TypeError, ValueError):
                raise ConfigError(
                    f"add_metric({name!r}) has a {type(value).__name__}; give a number."
                ) from None
        with self._lock:
            self._metrics[name] = number

    # ---- for the run

    @property
    def has_requests(self) -> bool:
        with self._lock:
            return self._requests != CallbackRequests()

    def take_requests(self) -> CallbackRequests:
        """The requests so far; the next call has those made after this one."""
        with self._lock:
            taken = self._requests
            self._requests = CallbackRequests()
            if taken.lr_scale is not None:
                self._lr_scale = taken.lr_scale
        return taken

    def take_metrics(self) -> dict[str, float | int]:
        with self._lock:
            taken = self._metrics
            self._metrics = {}
        return taken

    def reset(self, lr_scale: float) -> None:
        """Begin with the factor of a state that was built or restored.

        Requests that were made about another state are discarded.
        """
        with self._lock:
            self._lr_scale = lr_scale
            self._requests = CallbackRequests()

    def begin_record(self, names: Sequence[str]) -> None:
        """The names of the run's own numbers, which a callback may not replace."""
        self._names_in_use = frozenset(names)


class Callback:
    """Follows a run, and may act on it through `self.control`.

    Derive from it and define the methods you need. They are called on the first rank, in order and
    one at a time, between steps. One that raises ends the run: it is saved first, and the error is
    raised again by `train`.

    With `background = True` they are called in a thread of their own, so that slow work does not
    slow the steps. If they take longer than the steps, the oldest waiting `on_step` calls are left
    out. A background callback that raises, or takes more than 60 s for one call, is reported (event
    `callback`) and not called again; training continues.

    Example:
        >>> class UntilGood(hw.Callback):
        ...     def on_validate(self, step, metrics):
        ...         if metrics["valid"]["loss"] < 2.0:
        ...             self.control.stop("the loss is good enough")
        >>> hw.train(recipe, callbacks=[UntilGood()])
    """

    background: ClassVar[bool] = False
    """Whether methods are called in a thread of their own."""
    control: CallbackControl
    """Stops, saves, scales learning rates and adds metrics; there while a run trains."""

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


class RunCallbacks:
    """All callbacks of one call of `train`: those in the loop, and those in the background.

    Ranks other than the first have none.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.control = CallbackControl()
        self.error: BaseException | None = None
        """What a callback in the loop has raised."""
        self.error_text: str | None = None
        self.summary: Mapping[str, Any] = {}
        """What `on_end` receives when the run ends well."""
        for callback in callbacks:
            callback.control = self.control
        self.in_loop = [callback for callback in callbacks if not callback.background]
        self.threads = CallbackThreads([each for each in callbacks if each.background])
        # The saver's thread adds to it, the loop takes from it.
        self._saves: deque[tuple[int, Path]] = deque()

    @property
    def has_requests(self) -> bool:
        """Whether the ranks must exchange what callbacks requested."""
        return self.error is not None or self.control.has_requests

    def take_requests(self) -> CallbackRequests:
        return replace(self.control.take_requests(), error=self.error_text)

    def record(self, record: Mapping[str, Any], at_start: str = "") -> dict[str, float | int]:
        """Pass on the record of a step; returns the metrics that callbacks add to it."""
        step = int(record["step"])
        self.control.begin_record(list(record))
        self._deliver_saves()
        if self.in_loop:
            # A callback may change what it gets: the run's record stays as it is.
            copied = copy.deepcopy(dict(record))
            for callback in self.in_loop:
                # That validation was of the model before this step.
                if at_start in copied:
                    self._call(callback, "on_validate", step - 1, copied[at_start])
                self._call(callback, "on_step", step, copied)
                if "valid" in copied:
                    self._call(callback, "on_validate", step, copied["valid"])
        added = self.control.take_metrics()
        self.threads.record({**added, **record}, at_start)
        return added

    def saved(self, step: int, path: Path) -> None:
        """Pass on a save. Called from any thread; returns at once."""
        if self.in_loop:
            self._saves.append((step, path))
        self.threads.saved(step, path)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Call `on_end` of all; the error of one in the loop is in `error` afterwards."""
        self._deliver_saves()
        for callback in self.in_loop:
            self._call(callback, "on_end", summary, even_after_error=True)
        self.threads.summary = summary
        self.threads.close()

    def _deliver_saves(self) -> None:
        while self._saves:
            step, path = self._saves.popleft()
            for callback in self.in_loop:
                self._call(callback, "on_save", step, path)

    def _call(
        self, callback: Callback, method: str, *arguments: Any, even_after_error: bool = False
    ) -> None:
        """Call one method, and keep what it raises: all ranks must save before the run ends."""
        if self.error is not None and not even_after_error:
            return
        try:
            getattr(callback, method)(*arguments)
        # KeyboardInterrupt is not caught: it is the user's second Ctrl-C.
        except (Exception, SystemExit) as error:
            name = f"{type(callback).__module__}.{type(callback).__qualname__}"
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = (
                f"callback {name} failed in {method} ({frame.filename}:{frame.lineno}): "
                f"{type(error).__name__}: {first_line(error)}"
            )
            log.error("%s", text)
            # The first error is the one that ends the run.
            if self.error is None:
                self.error = error
                self.error_text = text


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

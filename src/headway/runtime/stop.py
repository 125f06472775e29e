"""Graceful stop: the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP (a terminal that closes) makes the
loop finish its step, save and exit; a second Ctrl-C stops at once.

Python runs a signal's handler only when its main thread returns from its current call, and a
collective or a compiler may block it for long. So the interpreter also writes each signal's number
into a pipe at once. A thread reads the pipe and does what a blocked main thread cannot: a second
Ctrl-C ends the process, and so does the end of the grace period, unless a save is in progress.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from headway.errors import Interrupted, Terminated
from headway.runtime.output import say

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
    if hasattr(signal, name)
)
NOTHING_TO_SAVE_SECONDS = 3.0
"""How long a process that has nothing to save may take to leave by itself."""
AT_ONCE_SECONDS = 1.0
"""How long the main thread has to leave by itself after a second Ctrl-C."""
POLL_SECONDS = 0.2
"""How often the thread looks whether the time is over, once there was a signal."""
SIGNAL_EXIT = 128
"""Shells give a process that a signal ended this exit code plus the signal's number."""


def handled_signals() -> list[int]:
    """The signals that request a stop.

    One that the parent ignored, as nohup and shells do, stays ignored.
    """
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def raise_for_signal(name: str | None, message: str, summary: Mapping[str, Any]) -> None:
    """Report a handled signal to the program that called us.

    Nothing happens for what is no signal (None, a request from outside).

    A handler that the program installed itself is called, and decides. Otherwise Interrupted
    (SIGINT) or Terminated is raised.
    """
    if name is None or name not in signal.Signals.__members__:
        return
    number = signal.Signals[name]
    handler = signal.getsignal(number)
    is_custom = callable(handler) and handler is not signal.default_int_handler
    if is_custom and threading.current_thread() is threading.main_thread():
        signal.raise_signal(number)
    elif number == signal.SIGINT:
        raise Interrupted(message, summary)
    else:
        raise Terminated(message, SIGNAL_EXIT + number, summary)


class StopBeforeStart(BaseException):
    """A stop was requested before there was anything to save.

    A BaseException, so that no library swallows it.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


class StopSignal:
    """A context in which signals are requests.

    `requested` is the first signal's name, None before; the old handlers come back at the end.

    Python delivers signals to the main thread only; in any other thread the context does nothing.
    While `starting`, a signal raises StopBeforeStart instead of waiting for a step that is far
    away.
    """

    def __init__(self, *, grace_seconds: float | None = None, starting: bool = False) -> None:
        self.requested: str | None = None
        self.requested_at: float | None = None
        self.starting = starting
        self.grace_seconds = grace_seconds
        self.is_saving: Callable[[], bool] = lambda: False
        self.has_something_to_save: Callable[[], bool] = lambda: True
        self.saved_step: Callable[[], int] = lambda: 0
        """The step of the newest checkpoint; 0 = there is none."""
        self.before_exit: Callable[[], None] = lambda: None
        """Called before this process ends itself without the interpreter's shutdown."""
        self._old_handlers: dict[int, Any] = {}
        self._is_leaving = False
        """Whether the user was informed that the process stops at once."""
        self._pipe: tuple[int, int] | None = None
        self._old_wakeup = -1
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            wanted = handled_signals()
            # The interpreter writes to the pipe inside its C handler, so the end must not block.
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, False)
            self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._old_handlers = {number: signal.signal(number, self._receive) for number in wanted}
            self._thread = threading.Thread(
                target=self._watch, args=(self._pipe[0],), name="headway-stop", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}
        if self._pipe is not None and self._thread is not None:
            # The pipe may be closed only when neither the interpreter nor the thread uses it.
            signal.set_wakeup_fd(self._old_wakeup)
            os.write(self._pipe[1], b"\0")
            self._thread.join()
            for end in self._pipe:
                os.close(end)
            self._pipe = self._thread = None

    def in_hurry(self) -> bool:
        """Whether half of the grace period has passed: only saving should still be done."""
        if self.requested_at is None or self.grace_seconds is None:
            return False
        return time.monotonic() - self.requested_at > self.grace_seconds / 2

    def kept(self) -> str:
        """What of the run is on disk if it ended now."""
        step = self.saved_step()
        if step == 0:
            return "nothing is kept: no checkpoint was saved yet"
        return f"the checkpoint of step {step} is kept"

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of all signals, in the main thread."""
        if self.requested is None:
            self.requested = signal.Signals(number).name
            self.requested_at = time.monotonic()
            if self.starting:
                # Imports, compilation and data preparation may take minutes, with nothing to save.
                raise StopBeforeStart(self.requested)
            # os.write, because a handler may interrupt a logging call that holds the stream.
            say(f"{self.requested}: finishing this step, then saving. Ctrl-C again stops at once.")
        elif number == signal.SIGINT:
            if not self._is_leaving:
                self._is_leaving = True
                say(f"stopped at once; {self.kept()}")
            raise KeyboardInterrupt

    def _watch(self, reading: int) -> None:
        """Read the signals as they arrive, even while the main thread is blocked.

        A zero byte is the end.
        """
        first: int | None = None
        first_at = 0.0
        leave_at = float("inf")
        while True:
            # Before the first signal there is no deadline: sleep until something arrives.
            timeout = None if first is None else POLL_SECONDS
            if select.select([reading], [], [], timeout)[0]:
                numbers = os.read(reading, 256)
                if 0 in numbers:
                    return
                for number in numbers:
                    if first is None and number in SIGNALS:
                        first = number
                        first_at = time.monotonic()
                    elif number == signal.SIGINT:
                        leave_at = min(leave_at, time.monotonic() + AT_ONCE_SECONDS)
            if first is None:
                continue

            # If the main thread leaves by itself before this is true, `__exit__` ends this thread.
            now = time.monotonic()
            if now > leave_at:
                self._leave(signal.SIGINT, "stopped at once")
            if self._is_late(now - first_at):
                self._leave(first, f"the grace period is over ({now - first_at:.0f} s)")

    def _is_late(self, seconds: float) -> bool:
        """Whether the process must end, this long after the first signal."""
        if self.is_saving():
            return False  # a save that ends at all is worth more than the grace period
        if self.starting or not self.has_something_to_save():
            return seconds > NOTHING_TO_SAVE_SECONDS
        return self.grace_seconds is not None and seconds > self.grace_seconds

    def _leave(self, number: int, why: str) -> None:
        if not self._is_leaving:
            say(f"{why}; {self.kept()}")
        self.before_exit()
        os._exit(SIGNAL_EXIT + number)

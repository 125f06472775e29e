"""Signals as a process in the foreground has them, in a test run that ignores some: shells start background jobs with SIGINT ignored,
nohup with SIGHUP ignored, and every child inherits that. What ignores a signal cannot be stopped with it, as headway promises."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headway.runtime.stop import SIGNALS


def heed_signals(numbers: Sequence[int] = SIGNALS) -> dict[int, object]:
    """Give this process Python's reaction to each of these signals; returns the earlier ones."""
    before: dict[int, object] = {}
    for number in numbers:
        handler = signal.SIG_DFL
        if number == signal.SIGINT:
            handler = signal.default_int_handler
        before[number] = signal.signal(number, handler)
    return before


@contextmanager
def heeded_signals() -> Iterator[None]:
    """The same until the end of the context."""
    before = heed_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

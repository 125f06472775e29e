"""Stopping well: the first SIGINT, SIGTERM or SIGUSR1 asks the loop to finish its step, save and leave; a second Ctrl-C stops at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


class StopSignal:
    """A context in which signals are requests. `requested` is the first signal's name, None before; the old handlers come back at the end.

    Python delivers signals to the main thread only; in any other thread the context does nothing.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            # a signal the parent had ignored, as shells do with Ctrl-C for jobs in the background, stays ignored
            wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._receive) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            # os.write, because a handler may interrupt a logging call that holds the stream.
            os.write(2, f"{self.requested}: finishing this step, then saving. Ctrl-C again stops at once.\n".encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

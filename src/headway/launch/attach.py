"""Follow a job from the shell that submitted it.

In: a target and a handle. Out: the status at the end.

Ctrl-C, SIGTERM and a terminal that closes cancel the job: the first time it saves and stops, the
second time it is killed. If this process is killed, the job continues; `headway launch logs
--follow` follows it again.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from headway.errors import LaunchError
from headway.launch.targets.base import JobHandle, JobStatus, Target
from headway.runtime.output import say
from headway.runtime.stop import handled_signals

EVERYTHING = 1_000_000
"""Lines: a job that was submitted just now is shown from its beginning."""


def attach(target: Target, handle: JobHandle, write: Callable[[str], object]) -> JobStatus:
    """Write the lines of a job as they come, until it has ended."""
    with _cancelling(target, handle):
        for line in target.logs(handle, lines=EVERYTHING, follow=True):
            write(line)
        return target.status(handle)


@contextmanager
def _cancelling(target: Target, handle: JobHandle) -> Iterator[None]:
    """Signals cancel the job instead of ending this process."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        name = signal.Signals(number).name
        if len(received) > 2:
            return
        if len(received) == 1:
            say(f"{name}: the job saves and stops. Ctrl-C again kills it.")
        else:
            say(f"{name}: killing the job.")
        with suppress(LaunchError):  # it has just ended
            target.cancel(handle)

    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, receive) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

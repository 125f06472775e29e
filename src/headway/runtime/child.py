"""A command that works on behalf of this one.

In: its words; out: its exit code and what it printed.

A stop signal for this process goes to the command, once, and this process ends when the command
has: it saves first, and no next step begins. The command has a process group of its own; otherwise
a Ctrl-C in the terminal would reach it twice, which means at once.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from headway.errors import Interrupted, Terminated
from headway.runtime.stop import SIGNAL_EXIT, handled_signals

LOOK_SECONDS = 0.5
"""How often this process looks up from its wait for the command."""


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    captures_errors: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Raises Interrupted or Terminated if this process received a stop signal meanwhile.
    """
    children: list[subprocess.Popen[str]] = []
    errors_to = subprocess.PIPE if captures_errors else None
    with (
        _forwarding(children) as received,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors_to,
            text=True,
            process_group=0,
        ) as child,
    ):
        children.append(child)
        # Signals that came before the command was there.
        for number in received:
            child.send_signal(number)
        out, errors = _finished(child)

    if received:
        first = received[0]
        message = (
            f"{signal.Signals(first).name}: stopped, after the process that worked for this one"
        )
        if first == signal.SIGINT:
            raise Interrupted(message)
        raise Terminated(message, SIGNAL_EXIT + first)
    return subprocess.CompletedProcess(list(command), child.returncode, out, errors)


def _finished(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What the command printed until its end.

    A signal that comes just before this process begins to wait does not wake it: it looks.
    """
    while True:
        try:
            return child.communicate(timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def _forwarding(children: list[subprocess.Popen[str]]) -> Iterator[list[int]]:
    """Signals go to the children while the block runs; the numbers that came are collected."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    # Only the main thread may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, forward) for number in handled_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

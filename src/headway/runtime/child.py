"""A command that works on behalf of this one. In: its words; out: its exit code and what it printed.

A stop signal for this process goes to the command, once, and this process ends when the command has: it saves first, and no next step
begins. The command has a process group of its own; otherwise a Ctrl-C in the terminal would reach it twice, which means at once.
"""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from headway.errors import Interrupted, Terminated
from headway.runtime.stop import handled_signals

LOOK_SECONDS = 0.5


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    captures_errors: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; raises Interrupted or Terminated if this process received a stop signal meanwhile."""
    children: list[subprocess.Popen[str]] = []
    with _forwarding(children) as received, subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if captures_errors else None, text=True, process_group=0,
    ) as child:  # fmt: skip
        children.append(child)
        for number in received:  # it came before the command was there
            child.send_signal(number)
        out, errors = _finished(child)
    if received:
        name = signal.Signals(received[0]).name
        message = f"{name}: stopped, after the process that worked for this one"
        raise (
            Interrupted(message)
            if received[0] == signal.SIGINT
            else Terminated(message, 128 + received[0])
        )
    return subprocess.CompletedProcess(list(command), child.returncode, out, errors)


def _finished(child: subprocess.Popen[str]) -> tuple[str, str]:
    """What the command printed until its end. A signal that comes just before this process begins to wait does not wake it: it looks."""
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

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, forward) for number in handled_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

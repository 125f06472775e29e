"""The program that ssh starts on every host of a job: `python -m headway.launch.ssh.agent`.

It checks the host, or runs its ranks.

In: JSON objects on standard input. Out: JSON objects on standard output (connection.py). When its
input ends, or is silent for too long, the session is gone: ranks get SIGTERM, with time for a save,
then SIGKILL. Nothing that it started outlives it: `headway train` ends with its parent, and its
ranks end with it. Imports no torch.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from headway import __version__
from headway.errors import HeadwayError
from headway.launch.ssh.connection import MARK
from headway.launch.ssh.host_check import HostCheck
from headway.launch.ssh.rank_agent import RankAgent
from headway.runtime.machine import package_version

MAX_WAITING_LINES = 10_000
"""Log lines that wait for a slow connection."""
CLOSE_SECONDS = 5.0
"""How long the last messages may take."""
READ_BYTES = 1 << 16
SILENT_SECONDS = 90.0
"""The other side sends something every few seconds.

The connection of a machine that lost its power does not end by itself.
"""

Send = Callable[[Mapping[str, Any]], None]


class Output:
    """Messages to the other side, written by a thread.

    A slow network never holds up the ranks: log lines that do not fit are counted.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes | None] = queue.Queue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="headway-output", daemon=True)
        self._thread.start()

    def send(self, content: Mapping[str, Any]) -> None:
        """Queue an object."""
        import json

        if "log" in content and self._waiting.qsize() > MAX_WAITING_LINES:
            self._dropped += 1
            return
        if self._dropped and "log" in content:
            dropped = self._dropped
            self._dropped = 0
            notice = (
                f"{dropped} lines are left out here: the connection is too slow. "
                "The run folder has them."
            )
            self.send({"log": notice})
        self._waiting.put(f"{MARK}{json.dumps(content)}\n".encode())

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits."""
        self._waiting.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        while (line := self._waiting.get()) is not None:
            unwritten = memoryview(line)
            try:
                while unwritten:
                    num_written = os.write(self._descriptor, unwritten)
                    unwritten = unwritten[num_written:]
            except OSError:
                return  # the session is gone; `Input` notices it and ends the agent


class Input:
    """Messages from the other side, read by a thread; None is the end."""

    def __init__(self, descriptor: int) -> None:
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._is_over = False
        threading.Thread(
            target=self._work, args=(descriptor,), name="headway-input", daemon=True
        ).start()

    def get(self, seconds: float) -> dict[str, Any] | None:
        """The next message; raises queue.Empty if none comes in time."""
        if self._is_over:
            return None
        message = self._messages.get(timeout=seconds)
        self._is_over = message is None
        return message

    def _work(self, descriptor: int) -> None:
        import json

        buffered = b""
        while True:
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except OSError:
                chunk = b""
            if not chunk:
                break
            # The last piece is a line whose end has not arrived yet.
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                self._messages.put(json.loads(line))
        self._messages.put(None)


def main() -> int:
    """Answer until the other side ends."""
    # What anything prints here must not mix with the messages: standard output becomes standard
    # error, and only this copy still leads to the other side.
    output_descriptor = os.dup(1)
    os.dup2(2, 1)
    # The end of the session shows in the input; ranks then get time to save.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    output = Output(output_descriptor)
    messages = Input(0)
    try:
        versions = {
            "headway": __version__,
            "torch": package_version("torch"),
            "python": sys.version.split()[0],
        }
        output.send({"hello": versions})
        return _serve(output.send, messages)
    except HeadwayError as problem:
        output.send({"refused": str(problem).splitlines()[0]})
        return problem.exit_code
    finally:
        output.close()


def _serve(send: Send, messages: Input) -> int:
    """Answer questions about this host, or run its ranks after `start`; returns the exit code."""
    check: HostCheck | None = None
    while True:
        try:
            message = messages.get(SILENT_SECONDS)
        except queue.Empty:
            return 1
        if message is None:
            return 0
        if message["do"] == "start":
            return RankAgent(message, send, messages.get, SILENT_SECONDS).run()
        if check is None:
            check = HostCheck(send, lambda: messages.get(SILENT_SECONDS))
        check.answer(message)


if __name__ == "__main__":
    sys.exit(main())

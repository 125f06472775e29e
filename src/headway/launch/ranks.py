"""The ranks of one node: started as children, watched, and ended together. Either all end well or none is left.

launcher ──▶ rank 0   its output is the launcher's, so it is on the screen
         ├─▶ rank 1   its output goes to logs/rank-00001.output.log, as soon as there is a run folder
         └─▶ ...      each in a process group of its own: Ctrl-C reaches the launcher alone, which passes it on once
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from headway.launch.failure import Ended, RankError, cause, first_cause, read_failure
from headway.runtime.deferred import Deferred
from headway.runtime.flight import explain_flight
from headway.runtime.output import Lossy
from headway.runtime.process import FAILURE_FILE, LAUNCHER_PID
from headway.runtime.stop import heeded_signals
from headway.runtime.temporary import make_temporary_folder, remove

POLL_SECONDS = 0.05
WATCH_SECONDS = 1.0
OUTPUT_WAITING_BYTES = 1 << 20
GRACE_SECONDS = 3.0
"""How long the other ranks of a failed one may take to end by themselves, and all ranks after a second Ctrl-C."""


@dataclass(frozen=True)
class RankStart:
    """One rank to start and the variables that tell it who it is."""

    rank: int
    environment: Mapping[str, str]


class RankProcesses:
    """The children of one launcher."""

    def __init__(self, command: Sequence[str], starts: Sequence[RankStart], environment: Mapping[str, str], logs: Path) -> None:
        self.logs, self.begun = logs, time.time()
        self.reasons = make_temporary_folder("ranks")
        self.received: list[int] = []
        self.kill_at: float | None = None
        self.over: set[int] = set()
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.readers: list[threading.Thread] = []
        own = {LAUNCHER_PID: str(os.getpid())}
        try:
            for start in starts:
                settings = {**environment, **own, **start.environment, FAILURE_FILE: str(self._reason(start.rank))}
                self._start(command, start.rank, settings)
        except BaseException:
            self.end()
            remove(self.reasons)
            raise

    def _reason(self, rank: int) -> Path:
        return self.reasons / f"{rank}.json"

    def _start(self, command: Sequence[str], rank: int, environment: Mapping[str, str]) -> None:
        pipe = None if rank == 0 else subprocess.PIPE
        joined = None if rank == 0 else subprocess.STDOUT
        child = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=pipe, stderr=joined, process_group=0, bufsize=0
        )
        self.children[rank] = child
        if child.stdout is not None:
            reader = threading.Thread(target=_keep_output, args=(child.stdout, self.output_log(rank)), daemon=True)
            reader.start()
            self.readers.append(reader)

    def output_log(self, rank: int) -> Path:
        """Where what a rank prints beside its log lines is kept."""
        return self.logs / f"rank-{rank:05}.output.log"

    def wait(self, trouble: Callable[[], RankError | None] = lambda: None) -> int:
        """Wait until all have ended; returns the exit code. If one fails, or `trouble` is told from elsewhere, all are ended."""
        before = {number: signal.signal(number, self._receive) for number in heeded_signals()}
        try:
            look_at = 0.0
            while self._alive():
                if failed := [one for one in self._ended() if self._is_failure(one)]:
                    raise self._failure(failed)
                if time.monotonic() > look_at:
                    look_at = time.monotonic() + WATCH_SECONDS
                    if (elsewhere := trouble()) is not None:
                        raise elsewhere
                if self.kill_at is not None and time.monotonic() > self.kill_at:
                    self.end()
                time.sleep(POLL_SECONDS)
            ended = self._ended()
            if failed := [one for one in ended if self._is_failure(one)]:
                raise self._failure(failed)
            return next((one.exit_code for one in ended if one.code != 0), 0)
        finally:
            self.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _alive(self) -> bool:
        """Whether any rank still runs. What an ended one left behind is killed at once, before its group's number can be given anew."""
        for rank, child in self.children.items():
            if rank not in self.over and child.poll() is not None:
                self._kill(rank)
        return len(self.over) < len(self.children)

    def _kill(self, rank: int) -> None:
        self.over.add(rank)
        try:
            os.killpg(self.children[rank].pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self.received:
            self.kill_at = time.monotonic() + GRACE_SECONDS
        self.received.append(number)
        for child in self.children.values():
            child.send_signal(number)

    def _ended(self) -> list[Ended]:
        found = ((rank, child.poll()) for rank, child in self.children.items())
        return [Ended(rank, code, read_failure(self._reason(rank))) for rank, code in found if code is not None]

    def _is_failure(self, one: Ended) -> bool:
        """Ending as asked is none; neither is dying of a signal that was passed on, which happens before training begins."""
        asked = one.failure is None and (-one.code in self.received or self.kill_at is not None)
        return one.code != 0 and not one.was_stopped and not asked

    def _failure(self, failed: Sequence[Ended]) -> RankError:
        """The error that names the first cause. The others have a moment to end by themselves and to write their last lines.

        The rank that failed first need not end first: under load, or hanging, it may end after those that lost it.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self._alive():
            time.sleep(POLL_SECONDS)
        by_itself = set(self.over)
        self.end()
        ended = self._ended()
        late = [one.as_it_said() for one in ended if one.is_cause and (one.rank in by_itself or one.failure is not None)]
        first = first_cause([*failed, *filter(self._is_failure, late)])
        for one in ended:
            self._keep_traceback(one)
        log = next((path for path in (self.logs / f"rank-{first.rank:05}.log", self.output_log(first.rank)) if path.exists()), None)
        message = f"{cause(first, log)} {explain_flight(self.logs, self.begun)}".rstrip()
        if log is None and first.failure is not None and first.failure.traceback is not None:
            Lossy(sys.stderr).write(first.failure.traceback)  # there is no run folder yet that could keep it
        return RankError(message, first.exit_code, first.at, first.failure.traceback if first.failure is not None else None)

    def _keep_traceback(self, one: Ended) -> None:
        if one.failure is not None and one.failure.traceback is not None and self.logs.is_dir():
            Deferred().append(self.logs / f"rank-{one.rank:05}.log", one.failure.traceback.encode())

    def end(self) -> None:
        """Kill whatever is left, with everything it started, and wait for it."""
        for rank in self.children.keys() - self.over:
            self._kill(rank)
        for child in self.children.values():
            child.wait()
        for reader in self.readers:
            reader.join(timeout=GRACE_SECONDS)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        remove(self.reasons)


def _keep_output(stream: IO[Any], target: Path) -> None:
    """Append what a rank prints to its file. What cannot be written, or has no run folder yet, waits here, up to a bound.

    A rank must never wait for this: whatever happens to the file, its output is read.
    """
    writes = Deferred(OUTPUT_WAITING_BYTES)
    writes.recovered = lambda text: None
    with stream:
        while chunk := stream.read(65536):
            writes.append(target, chunk)
    writes.retry()

"""The processes of one node's ranks: started, watched and ended together.

If one fails, all are killed.

    launcher ──▶ rank 0   shares the launcher's output, so it is on the screen
             ├─▶ rank 1   its output goes to logs/rank-00001.output.log, once there is a run folder
             └─▶ ...      each in its own process group: Ctrl-C reaches only the launcher, which
                          passes it on once
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

from headway.launch.failure import Ended, RankError, describe_cause, first_cause, read_failure
from headway.runtime.deferred import Deferred
from headway.runtime.flight import explain_flight
from headway.runtime.output import Lossy
from headway.runtime.process import FAILURE_FILE, LAUNCHER_PID
from headway.runtime.stop import handled_signals
from headway.runtime.temporary import make_temporary_folder, remove

POLL_SECONDS = 0.05
"""How often the processes are asked whether they have ended."""
WATCH_SECONDS = 1.0
"""How often the other nodes are asked for a failure."""
OUTPUT_WAITING_BYTES = 1 << 20
"""How much of a rank's output waits in memory while it cannot be written."""
READ_BYTES = 1 << 16
GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves after a failure, and all ranks after a
second Ctrl-C.
"""


@dataclass(frozen=True)
class RankStart:
    """One rank to start and the variables that identify it."""

    rank: int
    environment: Mapping[str, str]


class RankProcesses:
    """The child processes of one launcher."""

    def __init__(
        self,
        command: Sequence[str],
        starts: Sequence[RankStart],
        environment: Mapping[str, str],
        logs: Path,
    ) -> None:
        self.logs = logs
        self.begun = time.time()
        self.failures = make_temporary_folder("ranks")
        """The folder in which ranks report why they fail: there may be no run folder yet."""
        self.received: list[int] = []
        """Signals that were passed on."""
        self.kill_at: float | None = None
        """When all ranks are killed, after a second Ctrl-C."""
        self.ended: set[int] = set()
        """Ranks whose process group was killed: they have ended, with all their children."""
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.readers: list[threading.Thread] = []
        # If one cannot be started, those before it must not stay behind.
        try:
            for start in starts:
                settings = {
                    **environment,
                    LAUNCHER_PID: str(os.getpid()),
                    **start.environment,
                    FAILURE_FILE: str(self._failure_path(start.rank)),
                }
                self._start(command, start.rank, settings)
        except BaseException:
            self.end()
            remove(self.failures)
            raise

    def _failure_path(self, rank: int) -> Path:
        return self.failures / f"{rank}.json"

    def _start(self, command: Sequence[str], rank: int, environment: Mapping[str, str]) -> None:
        # Rank 0 inherits the launcher's streams; of the others both go into one pipe.
        is_first = rank == 0
        child = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if is_first else subprocess.PIPE,
            stderr=None if is_first else subprocess.STDOUT,
            process_group=0,
            bufsize=0,
        )
        self.children[rank] = child
        if child.stdout is not None:
            reader = threading.Thread(
                target=_copy_output, args=(child.stdout, self.output_log(rank)), daemon=True
            )
            reader.start()
            self.readers.append(reader)

    def rank_log(self, rank: int) -> Path:
        """The log file of a rank other than the first."""
        return self.logs / f"rank-{rank:05}.log"

    def output_log(self, rank: int) -> Path:
        """The file for what a rank prints apart from its log lines."""
        return self.logs / f"rank-{rank:05}.output.log"

    def wait(self, failure_elsewhere: Callable[[], RankError | None] = lambda: None) -> int:
        """Wait until all have ended; returns the exit code.

        If one fails, here or on another node, all are killed.
        """
        before = {number: signal.signal(number, self._receive) for number in handled_signals()}
        try:
            poll_at = 0.0
            while self._alive():
                if failed := list(filter(self._is_failure, self._find_ended())):
                    raise self._failure(failed)
                if time.monotonic() > poll_at:
                    poll_at = time.monotonic() + WATCH_SECONDS
                    if (elsewhere := failure_elsewhere()) is not None:
                        raise elsewhere
                # After a second Ctrl-C ranks stop by themselves; this is for those that hang.
                if self.kill_at is not None and time.monotonic() > self.kill_at:
                    self.end()
                time.sleep(POLL_SECONDS)

            # The last of them may have failed after the look above.
            all_ended = self._find_ended()
            if failed := list(filter(self._is_failure, all_ended)):
                raise self._failure(failed)
            return next((ended.exit_code for ended in all_ended if ended.code != 0), 0)
        finally:
            self.end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _alive(self) -> bool:
        """Whether any rank still runs.

        Children of an ended rank are killed at once, before the id of its group can be reused.
        """
        for rank, child in self.children.items():
            if rank not in self.ended and child.poll() is not None:
                self._kill(rank)
        return len(self.ended) < len(self.children)

    def _kill(self, rank: int) -> None:
        self.ended.add(rank)
        try:
            os.killpg(self.children[rank].pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals: pass them on."""
        # A second Ctrl-C.
        if number == signal.SIGINT and number in self.received:
            self.kill_at = time.monotonic() + GRACE_SECONDS
        self.received.append(number)
        for child in self.children.values():
            child.send_signal(number)

    def _find_ended(self) -> list[Ended]:
        """The ranks that have ended so far, with what they reported."""
        all_ended: list[Ended] = []
        for rank, child in self.children.items():
            code = child.poll()
            if code is not None:
                all_ended.append(Ended(rank, code, read_failure(self._failure_path(rank))))
        return all_ended

    def _is_failure(self, ended: Ended) -> bool:
        """A requested stop is no failure, nor is death by a signal that was passed on, which
        happens before training begins.
        """
        was_signalled = ended.failure is None and (
            -ended.code in self.received or self.kill_at is not None
        )
        return ended.code != 0 and not ended.was_stopped and not was_signalled

    def _failure(self, failed: Sequence[Ended]) -> RankError:
        """The error that names the first cause.

        The other ranks get a moment to end by themselves and write their last lines.

        The rank that failed first need not end first: under load, or hanging, it may end after its
        peers.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self._alive():
            time.sleep(POLL_SECONDS)
        ended_alone = set(self.ended)
        self.end()

        # A rank that is killed here has SIGKILL as its code, which would make it the first cause:
        # only what it reported counts then.
        all_ended = self._find_ended()
        late: list[Ended] = []
        for ended in all_ended:
            if ended.is_cause and (ended.rank in ended_alone or ended.failure is not None):
                late.append(ended.with_reported_code())
        first = first_cause([*failed, *filter(self._is_failure, late)])

        for ended in all_ended:
            self._write_traceback(ended)
        logs = (self.rank_log(first.rank), self.output_log(first.rank))
        log = next((path for path in logs if path.exists()), None)
        message = f"{describe_cause(first, log)} {explain_flight(self.logs, self.begun)}".rstrip()

        traceback = None
        if first.failure is not None:
            traceback = first.failure.traceback
        if log is None and traceback is not None:
            # There is no run folder yet to write it to.
            Lossy(sys.stderr).write(traceback)
        return RankError(message, first.exit_code, first.at, traceback)

    def _write_traceback(self, ended: Ended) -> None:
        if ended.failure is None or ended.failure.traceback is None or not self.logs.is_dir():
            return
        Deferred().append(self.rank_log(ended.rank), ended.failure.traceback.encode())

    def end(self) -> None:
        """Kill every rank that still runs, with its children, and wait for it."""
        for rank in self.children.keys() - self.ended:
            self._kill(rank)
        for child in self.children.values():
            child.wait()
        # With a limit: a process that left the group of its rank may still hold the pipe open.
        for reader in self.readers:
            reader.join(timeout=GRACE_SECONDS)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        remove(self.failures)


def _copy_output(stream: IO[Any], target: Path) -> None:
    """Append what a rank prints to its file.

    Output waits here, up to a limit, while there is no run folder or the disk is full.

    A rank never blocks on this: its output is always read.
    """
    writes = Deferred(OUTPUT_WAITING_BYTES)
    # Waiting for the run folder is no trouble to report.
    writes.recovered = lambda text: None
    with stream:
        while chunk := stream.read(READ_BYTES):
            writes.append(target, chunk)
    writes.retry()

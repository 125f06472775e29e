"""Why a rank failed: the rank writes it to a file, the launcher finds the first cause and reports
it in one line.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import HeadwayError, TrainingError
from headway.runtime.heartbeat import read_beats
from headway.runtime.json_file import load_json
from headway.runtime.output import flush_streams, say
from headway.runtime.process import end_with_launcher, failure_file
from headway.runtime.stop import SIGNAL_EXIT, SIGNALS
from headway.track.events import send_crash_alert, traceback_tail

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")

USERS_MISTAKE = 2
"""The exit code of a user error. It causes no restart, which would meet the same error."""


def shell_code(returncode: int) -> int:
    """A return code of subprocess as a shell shows it: 128 + N if signal N killed the process."""
    if returncode < 0:
        return SIGNAL_EXIT - returncode
    return returncode


def is_stop_code(code: int) -> bool:
    """Whether an exit code says that a process stopped by request: a signal or `headway stop`."""
    return code - SIGNAL_EXIT in SIGNALS


@dataclass(frozen=True)
class Failure:
    """Why a rank fails, as the rank wrote it."""

    message: str
    exit_code: int
    at: float
    """When, in seconds since the epoch."""
    traceback: str | None = None
    """None for an error of headway's own types: its one line says everything."""


class RankError(TrainingError):
    """A rank failed and all were killed.

    `at` orders causes: the time of the failure, or 0 for a rank killed by a signal.
    """

    def __init__(
        self, message: str, exit_code: int, at: float, traceback: str | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.at = at
        self.traceback = traceback


@dataclass(frozen=True)
class Ended:
    """A rank that ended.

    `code` is that of subprocess, negative if a signal killed it; `with_reported_code` replaces it
    by an exit code.
    """

    rank: int
    code: int
    failure: Failure | None = None

    @property
    def exit_code(self) -> int:
        """The code as a shell shows it."""
        return shell_code(self.code)

    @property
    def at(self) -> float:
        """When it failed, if it reported the time; see RankError."""
        # A rank that a signal killed wrote no time. It comes first: what others report after it is
        # only the loss of this rank.
        if self.code < 0:
            return 0.0
        if self.failure:
            return self.failure.at
        # No time is known: it sorts after every failure that reported one.
        return time.time()

    @property
    def is_cause(self) -> bool:
        """Whether it may have failed first: it reported a failure, or SIGKILL ended it.

        Other signals do not count: SIGABRT may follow from the loss of a peer.
        """
        return self.failure is not None or self.code == -signal.SIGKILL

    def with_reported_code(self) -> Ended:
        """With the exit code that it reported, if it was killed before it could exit."""
        if self.failure is not None:
            return replace(self, code=self.failure.exit_code)
        return self

    @property
    def was_stopped(self) -> bool:
        """It ended normally because of a stop request."""
        return self.failure is None and is_stop_code(self.code)


def report_failure(path: Path, error: Exception) -> int:
    """Write why this rank fails; returns its exit code."""
    if isinstance(error, HeadwayError):
        failure = Failure(str(error), error.exit_code, time.time())
    else:
        lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
        message = lines[0] if lines else type(error).__name__
        trace = "".join(traceback.format_exception(error))
        failure = Failure(message, 1, time.time(), trace)

    try:
        path.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    except OSError as problem:
        # The launcher then knows only the exit code.
        say(f"this rank failed and cannot write why ({problem.strerror}): {failure.message}")
    return failure.exit_code


def read_failure(path: Path) -> Failure | None:
    """The failure that a rank wrote; None if it wrote nothing, or was killed while writing."""
    try:
        return Failure(**load_json(path))
    except (OSError, ValueError, TypeError):
        return None


def first_cause(ended: Sequence[Ended]) -> Ended:
    """The rank that failed first: one killed by a signal, else the earliest error.

    The others only lost a peer.
    """
    return min(ended, key=lambda rank_end: (rank_end.at, rank_end.rank))


def describe_cause(ended: Ended, log: Path | None) -> str:
    """One line with the rank and the cause; `log` is the rank's log file, to point to.

    A user error is the same on every rank, so it names none.
    """
    if ended.failure is not None and ended.failure.exit_code == USERS_MISTAKE:
        return ended.failure.message

    if ended.failure is not None:
        why = f"failed: {ended.failure.message}"
    elif ended.code < 0:
        name = signal.Signals(-ended.code).name
        hint = " (by a user, or because memory ran out)" if name == "SIGKILL" else ""
        why = f"was killed by {name}{hint}"
    else:
        why = f"ended with exit code {ended.code}"

    pointer = ""
    if log is not None:
        pointer = f" More in {log}."
    return f"rank {ended.rank} {why.rstrip('.')}. All ranks were stopped.{pointer}"


def run_as_rank(function: Callable[[], int]) -> int:
    """Run `function` in a child of the launcher, and return its exit code. The child ends with the
    launcher, and writes a failure to a file for the launcher instead of printing it.
    """
    # First: a launcher that is killed from here on takes this rank with it.
    end_with_launcher()
    path = failure_file()
    assert path is not None
    try:
        return function()
    except Exception as error:  # not swallowed: the launcher prints it
        code = report_failure(path, error)
        # Exit at once: threads of a broken process group may keep the interpreter from ending.
        flush_streams()
        os._exit(code)


def report_crash(recipe: Recipe, error: RankError) -> None:
    """Log where every rank was last, and report the crash, once, with the end of its traceback."""
    if error.exit_code == USERS_MISTAKE:
        return

    # Ranks that were killed have left their last heartbeats.
    beats = read_beats(recipe.run.folder)
    now = time.time()
    for beat in beats:
        log.info("last seen: %s", beat.describe(now))

    text = str(error)
    if error.traceback:
        text = f"{traceback_tail(error.traceback)}\n{error}"
    step = max((beat.step for beat in beats), default=0)
    try:
        send_crash_alert(recipe.track, recipe.run.folder, text, step)
    except (OSError, HeadwayError) as problem:
        log.warning("the crash could not be reported: %s", problem)

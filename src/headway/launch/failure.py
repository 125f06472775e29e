"""Why a rank failed: the rank writes it to a file, the launcher finds the first cause and reports it in one line."""

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
from headway.runtime.stop import SIGNALS
from headway.track.events import send_crash_alert, traceback_tail

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")

USERS_MISTAKE = 2
STOP_SIGNALS = SIGNALS


@dataclass(frozen=True)
class Failure:
    """Why a rank fails, as the rank wrote it."""

    message: str
    exit_code: int
    at: float
    traceback: str | None = None
    """None for a user error: its one line says everything."""


class RankError(TrainingError):
    """A rank failed and all were killed. `at` orders causes: the time of the failure, or 0 for a rank killed by a signal."""

    def __init__(
        self, message: str, exit_code: int, at: float, traceback: str | None = None
    ) -> None:
        super().__init__(message)
        self.exit_code, self.at, self.traceback = exit_code, at, traceback


@dataclass(frozen=True)
class Ended:
    """A rank that ended. `code` is that of subprocess: negative if a signal killed it."""

    rank: int
    code: int
    failure: Failure | None = None

    @property
    def exit_code(self) -> int:
        """The code as a shell shows it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def at(self) -> float:
        """When it failed, if it reported the time; see RankError."""
        return 0.0 if self.code < 0 else self.failure.at if self.failure else time.time()

    @property
    def is_cause(self) -> bool:
        """Whether it may have failed first: it reported when, or was killed. An abort does not count: a lost peer may cause it."""
        return self.failure is not None or self.code == -signal.SIGKILL

    def with_reported_code(self) -> Ended:
        """With the exit code that it reported, if it was killed before it could exit."""
        return replace(self, code=self.failure.exit_code) if self.failure is not None else self

    @property
    def was_stopped(self) -> bool:
        """It ended normally because of a stop request."""
        return self.failure is None and self.code in [128 + number for number in STOP_SIGNALS]


def report_failure(path: Path, error: Exception) -> int:
    """Write why this rank fails; returns its exit code."""
    if isinstance(error, HeadwayError):
        failure = Failure(str(error), error.exit_code, time.time())
    else:
        last = "".join(traceback.format_exception_only(error)).strip().splitlines()
        failure = Failure(
            last[0] if last else type(error).__name__,
            1,
            time.time(),
            "".join(traceback.format_exception(error)),
        )
    try:
        path.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    except OSError as problem:  # the launcher then reports only the exit code
        say(f"this rank failed and cannot write why ({problem.strerror}): {failure.message}")
    return failure.exit_code


def read_failure(path: Path) -> Failure | None:
    """The failure that a rank wrote; None if it wrote nothing, or was killed while writing."""
    try:
        return Failure(**load_json(path))
    except (OSError, ValueError, TypeError):
        return None


def first_cause(ended: Sequence[Ended]) -> Ended:
    """The rank that failed first: one killed by a signal, else the earliest error. The others only lost a peer."""
    return min(ended, key=lambda one: (one.at, one.rank))


def describe_cause(one: Ended, log: Path | None) -> str:
    """One line with the rank and the cause; a user error is the same on every rank, so it names none."""
    if one.failure is not None and one.failure.exit_code == USERS_MISTAKE:
        return one.failure.message
    if one.failure is not None:
        why = f"failed: {one.failure.message}"
    elif one.code < 0:
        name = signal.Signals(-one.code).name
        hint = " (by a user, or because memory ran out)" if name == "SIGKILL" else ""
        why = f"was killed by {name}{hint}"
    else:
        why = f"ended with exit code {one.code}"
    where = f" More in {log}." if log is not None else ""
    return f"rank {one.rank} {why.rstrip('.')}. All ranks were stopped.{where}"


def run_as_rank(function: Callable[[], int]) -> int:
    """Run a child of the launcher: it ends with the launcher, and reports a failure to the launcher instead of printing it."""
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
    beats, now = read_beats(recipe.run.folder), time.time()
    for beat in beats:
        log.info("last seen: %s", beat.describe(now))
    text = f"{traceback_tail(error.traceback)}\n{error}" if error.traceback else str(error)
    try:
        send_crash_alert(
            recipe.track, recipe.run.folder, text, max((beat.step for beat in beats), default=0)
        )
    except (OSError, HeadwayError) as problem:
        log.warning("the crash could not be reported: %s", problem)

"""`headway supervise -- COMMAND`: starts a training command, watches it, and restarts it until it
is done or cannot succeed.

    exit code 0         done
    2                   a user error: a restart would repeat it
    3                   training gave up; a person must look
    129, 130, 138, 143  stopped by a signal or `headway stop`
    anything else       a crash: restart from the newest complete checkpoint, after a growing pause

If the ranks make no progress, their stacks are recorded and the run is killed and restarted. The
count of failures starts again when the run gets further than before. torchrun has one exit code for
everything, so the command also writes its own code to a file.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from headway.errors import HeadwayError, LaunchError
from headway.launch.failure import USERS_MISTAKE, is_stop_code, shell_code
from headway.launch.hang import HangDetector, record_hang, send_signal
from headway.runtime.deferred import Deferred
from headway.runtime.heartbeat import Beat, read_beats
from headway.runtime.json_file import read_bounded
from headway.runtime.process import OUTCOME_FILE, RESTARTS, SUPERVISOR, safe_environment
from headway.runtime.progress import duration
from headway.runtime.stop import SIGNAL_EXIT, handled_signals
from headway.runtime.storage import write_atomic
from headway.runtime.temporary import temporary_folder
from headway.track.base import Event
from headway.track.events import claim_crash_report, report_event
from headway.train.control import read_request, remove_request
from headway.train.stages import steps_saved

if TYPE_CHECKING:
    from headway.train.config import Recipe
    from headway.train.launch_config import SuperviseConfig

log = logging.getLogger("headway")

GAVE_UP = 3
"""The exit code of a run that stopped itself for a person to look at."""
POLL_SECONDS = 0.1
"""How often the command is asked whether it has ended."""
CHECK_SECONDS = 1.0
"""How often heartbeats are read."""
MAX_BACKOFF_SECONDS = 600.0
PRESENCE_FILE = Path("logs") / "supervisor.json"
Report = Callable[[Event, str, int], None]
"""Called with an event, its text and the step it belongs to."""


@dataclass(frozen=True)
class RestartPolicy:
    """When a supervisor restarts a command, and when it gives up."""

    max_restarts: int = 5
    """Failures in a row, without a newer checkpoint, before it gives up."""
    backoff_seconds: float = 10.0
    """Pause before the first restart; doubled with each failure in a row, ten minutes at most."""
    hang_seconds: float = 900.0
    """A rank that makes no progress for this long hangs."""

    def pause(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row."""
        # A pause that the user chose longer than the limit stays as it is.
        limit = max(MAX_BACKOFF_SECONDS, self.backoff_seconds)
        return min(self.backoff_seconds * 2 ** (failures - 1), limit)


class Supervisor:
    """Supervises one command.

    `run_dir` holds the heartbeats and checkpoints of its ranks; without it only exit codes count.
    """

    def __init__(
        self,
        command: Sequence[str],
        policy: RestartPolicy,
        run_dir: Path | None,
        environment: Mapping[str, str],
        report: Report = lambda *_: None,
    ) -> None:
        self.command = list(command)
        self.policy = policy
        self.run_dir = run_dir
        self.report = report
        self.job = str(uuid.uuid4())
        self.environment = dict(environment)
        self.received: list[int] = []
        """Stop signals that this process got."""
        self.passes_on: int | None = None
        """The signal that the command gets for any that this process receives; None = the same one.
        """
        self.child: subprocess.Popen[bytes] | None = None
        self.restarts = 0
        self.failures = 0
        """In a row, without a newer checkpoint."""
        self.furthest = -1
        """The newest saved step that was seen; -1 = none."""
        self.hang_detector = HangDetector(policy.hang_seconds)
        self.writes = Deferred()
        self.can_write = True
        """Whether the disk of the run folder can be written."""
        self.saved_step: Callable[[], int] = self._saved_step_here

    def _saved_step_here(self) -> int:
        if self.run_dir is None:
            return -1
        return steps_saved(self.run_dir)

    def run(self) -> int:
        """Run until the command is done, stopped, or has failed too often.

        Returns its exit code as a shell shows it.
        """
        before = {number: signal.signal(number, self._receive) for number in handled_signals()}
        try:
            with temporary_folder("supervise") as folder:
                while True:
                    code = self._run_once(folder / "outcome")
                    if code is not None:
                        return code
        finally:
            if self.child is not None and self.child.poll() is None:
                self._kill()
            # `headway stop` takes the file for a supervisor that would start the run again.
            if self.run_dir is not None:
                (self.run_dir / PRESENCE_FILE).unlink(missing_ok=True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_once(self, outcome: Path) -> int | None:
        """Start the command once and wait for its end; None means restart."""
        outcome.unlink(missing_ok=True)
        variables = {SUPERVISOR: self.job, RESTARTS: str(self.restarts), OUTCOME_FILE: str(outcome)}
        # Heartbeats of the start before must not be taken for ranks that hang.
        stale = read_beats(self.run_dir) if self.run_dir is not None else ()
        self.hang_detector = HangDetector(self.policy.hang_seconds, stale)
        # A group of its own: a Ctrl-C in the terminal reaches this process, which passes it on.
        self.child = subprocess.Popen(
            self.command, env={**self.environment, **variables}, process_group=0
        )
        was_hung = self._watch(self.child)

        code = _read_outcome(outcome, shell_code(self.child.returncode))
        if not was_hung and (code in (0, USERS_MISTAKE, GAVE_UP) or self._was_stopped(code)):
            return code

        self._count_failure()
        why = "it hung" if was_hung else f"exit code {code}"
        if self.failures > self.policy.max_restarts:
            log.error(
                "%s; giving up after %d failures in a row without a newer checkpoint",
                why,
                self.failures,
            )
            self.report(
                "crash",
                f"{why}; gave up after {self.failures} failures in a row",
                max(self.furthest, 0),
            )
            # A hung run that was killed may have left 0 in the outcome file.
            return code or 1

        pause = self.policy.pause(self.failures)
        log.warning(
            "%s; restarting in %s (failure %d of at most %d in a row)",
            why,
            duration(pause),
            self.failures,
            self.policy.max_restarts + 1,
        )
        # A process that a signal killed reported nothing itself, unless its launcher did.
        if not was_hung and code > SIGNAL_EXIT:
            killed = f"killed by {_signal_name(code - SIGNAL_EXIT)}; restarting"
            if self.run_dir is None or claim_crash_report(self.run_dir, killed, self.job):
                self.report("crash", killed, max(self.furthest, 0))
        self.restarts += 1
        return self._wait(pause)

    def _wait(self, seconds: float) -> int | None:
        """Pause before a restart; a signal or a stop request ends the supervision."""
        deadline = time.monotonic() + seconds
        while True:
            if self.received:
                return SIGNAL_EXIT + self.received[0]
            if self.run_dir is not None:
                # Requests for a later step, or only for a save, are for the ranks to come.
                request = read_request(self.run_dir)
                if request is not None and request.at_step is None and not request.save_only:
                    remove_request(self.run_dir)
                    return SIGNAL_EXIT + signal.SIGTERM
            if time.monotonic() >= deadline:
                return None
            self._write_presence()
            time.sleep(POLL_SECONDS)

    def _was_stopped(self, code: int) -> bool:
        return bool(self.received) or is_stop_code(code)

    def _count_failure(self) -> None:
        """Count a failure; a run that got further than before starts counting again."""
        step = self.saved_step()
        if step > self.furthest:
            self.furthest = step
            self.failures = 0
        self.failures += 1

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Noted first: from here on no restart follows, whatever the exit code is.
        self.received.append(number)
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number if self.passes_on is None else self.passes_on)

    def _watch(self, child: subprocess.Popen[bytes]) -> bool:
        """Wait until the command has ended; True if it hung and was killed."""
        check_at = 0.0
        while child.poll() is None:
            # A run that is stopping has its own grace period; it is not watched for hangs.
            if time.monotonic() >= check_at and not self.received:
                check_at = time.monotonic() + CHECK_SECONDS
                self._write_presence()
                self.writes.retry(now=False)
                if self.run_dir is not None:
                    beats = read_beats(self.run_dir)
                    hung = self.hang_detector.hung(beats, counts=self.can_write)
                    if hung:
                        self._end_hung(hung)
                        return True
            time.sleep(POLL_SECONDS)
        return False

    def _end_hung(self, beats: list[Beat]) -> None:
        assert self.run_dir is not None
        log.error(
            "no progress for %s; recording the stacks of every rank, then restarting",
            duration(self.policy.hang_seconds),
        )
        text = record_hang(self.run_dir, beats, self.writes)
        self.report("hang", text, max(beat.step for beat in beats))
        self._kill(beats)

    def _kill(self, beats: Sequence[Beat] = ()) -> None:
        """Kill the command and the ranks.

        The ranks by their own ids, because launchers put them into separate groups.
        """
        assert self.child is not None
        for beat in beats:
            send_signal(beat.pid, signal.SIGKILL)
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()

    def _write_presence(self) -> None:
        """Show `headway stop` that this run is supervised.

        A disk that cannot be written ends neither run nor supervisor.
        """
        if self.run_dir is not None and (self.run_dir / "logs").is_dir():
            presence = {"pid": os.getpid(), "host": socket.gethostname(), "at": time.time()}
            try:
                write_atomic(self.run_dir / PRESENCE_FILE, json.dumps(presence))
                self.can_write = True
            except HeadwayError as problem:
                if self.can_write:
                    self.can_write = False
                    log.warning(
                        "%s The run is still supervised; hangs are not detected until the disk "
                        "can be written.",
                        problem,
                    )
                    self.report("save_failure", str(problem), max(self.furthest, 0))


def _read_outcome(outcome: Path, code: int) -> int:
    """The exit code that the command wrote to the file, else `code`."""
    # A launcher in between, such as torchrun, may have one code for every failure.
    try:
        text = read_bounded(outcome).decode("utf-8").strip()
    except (OSError, ValueError):
        return code
    if text.isdecimal():
        return int(text)
    return code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def make_supervisor(
    command: Sequence[str],
    settings: SuperviseConfig,
    recipe: Recipe | None,
    run_dir: Path | None = None,
) -> Supervisor:
    """A supervisor whose events go to the trackers of the recipe."""
    folder = run_dir
    if folder is None and recipe is not None:
        folder = recipe.run.folder

    # A missing address is refused now, not when the first message is due.
    trackers = recipe.track if recipe is not None else ()
    if folder is not None:
        for config in trackers:
            tracker = config.build_outside(folder, folder.name)
            if tracker is not None:
                tracker.close()

    policy = RestartPolicy(settings.max_restarts, settings.backoff_seconds, settings.hang_seconds)
    supervisor = Supervisor(command, policy, folder, safe_environment(command, os.environ))
    if folder is not None:
        supervisor.report = lambda event, text, step: report_event(
            trackers, folder, event, text, step, supervisor.writes
        )
    return supervisor


def supervise(
    command: Sequence[str],
    settings: SuperviseConfig,
    recipe: Recipe | None,
    run_dir: Path | None = None,
) -> int:
    """Run a command under a supervisor; returns its exit code."""
    supervisor = make_supervisor(command, settings, recipe, run_dir)
    try:
        return supervisor.run()
    except (FileNotFoundError, PermissionError) as problem:
        raise LaunchError(
            f"{command[0]}: {problem.strerror}. Give a command that can be run, after --."
        ) from None

"""`headway supervise -- COMMAND`: starts a training command, watches it, and starts it again until it is done or will never be.

    exit code 0         done                                    2   the user's mistake: starting again would repeat it
    129, 130, 138, 143  stopped by a signal or `headway stop`   3   training gave up and wants somebody to look
    anything else       a crash: again, later each time, from the newest complete checkpoint

A run whose ranks make no progress is asked for its stacks, killed and started again. Failures are counted anew once a run gets further than
ever. With torchrun in between, which has one exit code for everything, the command leaves its own in a file.
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
from headway.launch.failure import STOP_SIGNALS, USERS_MISTAKE
from headway.runtime.deferred import Deferred
from headway.runtime.heartbeat import STACK_SIGNAL, Beat, is_alive, read_beats, stacks_file, suspects
from headway.runtime.process import OUTCOME_FILE, RESTARTS, SUPERVISOR, safe_environment
from headway.runtime.progress import duration
from headway.runtime.stop import heeded_signals
from headway.runtime.storage import write_atomic
from headway.runtime.temporary import temporary_folder
from headway.track.base import Event
from headway.track.outside import claim_crash, tell_outside
from headway.train.place import steps_saved
from headway.train.request import read_request, withdraw

if TYPE_CHECKING:
    from headway.train.config import Recipe, SuperviseConfig

log = logging.getLogger("headway")

GAVE_UP = 3
POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0
MOST_LOOK_SECONDS = 5.0
"""What one look counts for at most, however long ago the last one was."""
STACK_SECONDS = 3.0
MOST_BACKOFF_SECONDS = 600.0
PRESENCE = Path("logs") / "supervisor.json"
Tell = Callable[[Event, str, int], None]


@dataclass(frozen=True)
class RestartPolicy:
    """How patient a supervisor is."""

    max_restarts: int = 5
    """Failures in a row, without getting further, before it gives up."""
    backoff_seconds: float = 10.0
    """Pause before the first restart; doubled with each failure in a row, ten minutes at most."""
    hang_seconds: float = 900.0
    """How long no rank may fail to make progress once training has begun."""

    def pause(self, failures: int) -> float:
        """Seconds to wait after that many failures in a row."""
        return min(self.backoff_seconds * 2 ** (failures - 1), max(MOST_BACKOFF_SECONDS, self.backoff_seconds))


class Supervisor:
    """Looks after one command. `run_dir` is where its ranks leave heartbeats and checkpoints; without one only exit codes are seen."""

    def __init__(
        self,
        command: Sequence[str],
        policy: RestartPolicy,
        run_dir: Path | None,
        environment: Mapping[str, str],
        tell: Tell = lambda *_: None,
    ) -> None:
        self.command, self.policy, self.run_dir, self.tell = list(command), policy, run_dir, tell
        self.job = str(uuid.uuid4())
        self.environment = dict(environment)
        self.received: list[int] = []
        self.child: subprocess.Popen[bytes] | None = None
        self.restarts = self.failures = 0
        self.furthest = -1
        self.patience = HangDetector(policy.hang_seconds)
        self.writes = Deferred()
        self.can_write = True

    def run(self) -> int:
        """Until the command is done, stopped, or has failed too often; returns its exit code, as a shell has it."""
        before = {number: signal.signal(number, self._receive) for number in heeded_signals()}
        try:
            with temporary_folder("supervise") as folder:
                while True:
                    code = self._once(folder / "outcome")
                    if code is not None:
                        return code
        finally:
            if self.child is not None and self.child.poll() is None:
                self._kill()
            if self.run_dir is not None:
                (self.run_dir / PRESENCE).unlink(missing_ok=True)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _once(self, outcome: Path) -> int | None:
        """One start and its end; None = start again."""
        outcome.unlink(missing_ok=True)
        own = {SUPERVISOR: self.job, RESTARTS: str(self.restarts), OUTCOME_FILE: str(outcome)}
        self.patience = HangDetector(self.policy.hang_seconds, read_beats(self.run_dir) if self.run_dir is not None else ())
        self.child = subprocess.Popen(self.command, env={**self.environment, **own}, process_group=0)
        was_hung = self._watch(self.child)
        code = self.child.returncode if self.child.returncode >= 0 else 128 - self.child.returncode
        code = _left_in(outcome, code)
        if not was_hung and (code in (0, USERS_MISTAKE, GAVE_UP) or self._was_asked(code)):
            return code
        self._count_failure()
        why = "it hung" if was_hung else f"exit code {code}"
        if self.failures > self.policy.max_restarts:
            log.error("%s; it failed %d times in a row without getting further: given up", why, self.failures)
            self.tell("crash", f"{why}; given up after {self.failures} failures in a row", max(self.furthest, 0))
            return code or 1
        pause = self.policy.pause(self.failures)
        log.warning(
            "%s; starting again in %s, failure %d of at most %d in a row", why, duration(pause), self.failures, self.policy.max_restarts + 1
        )
        killed = f"killed by {_signal_name(code - 128)}; starting again"
        if not was_hung and code > 128 and (self.run_dir is None or claim_crash(self.run_dir, killed, self.job)):
            self.tell("crash", killed, max(self.furthest, 0))  # nobody else could tell
        self.restarts += 1
        return self._wait(pause)

    def _wait(self, seconds: float) -> int | None:
        """The pause before a restart; a signal or a request to stop ends it for good."""
        until = time.monotonic() + seconds
        while True:
            if self.received:
                return 128 + self.received[0]
            request = read_request(self.run_dir) if self.run_dir is not None else None
            if request is not None and request.at_step is None and not request.save_only and self.run_dir is not None:
                withdraw(self.run_dir)
                return 128 + signal.SIGTERM
            if time.monotonic() >= until:
                return None
            self._be_present()
            time.sleep(POLL_SECONDS)

    def _was_asked(self, code: int) -> bool:
        return bool(self.received) or code - 128 in STOP_SIGNALS

    def _count_failure(self) -> None:
        """A run that got further than ever starts with a clean slate."""
        step = self._newest_step()
        self.failures = 1 if step > self.furthest else self.failures + 1
        self.furthest = max(self.furthest, step)

    def _newest_step(self) -> int:
        return -1 if self.run_dir is None else steps_saved(self.run_dir)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def _watch(self, child: subprocess.Popen[bytes]) -> bool:
        """Until the command has ended; True if that was because it hung."""
        look_at = 0.0
        while child.poll() is None:
            if time.monotonic() >= look_at and not self.received:
                look_at = time.monotonic() + LOOK_SECONDS
                self._be_present()
                self.writes.retry(now=False)
                if self.run_dir is not None and (hung := self.patience.hung(read_beats(self.run_dir), counts=self.can_write)):
                    self._end_hung(hung)
                    return True
            time.sleep(POLL_SECONDS)
        return False

    def _end_hung(self, beats: list[Beat]) -> None:
        assert self.run_dir is not None
        now = time.time()
        states = [beat.describe(now) for beat in beats]
        log.error("no progress for %s; asking every rank for its stacks, then starting again", duration(self.policy.hang_seconds))
        written = self._ask_for_stacks(beats)
        blame = suspects(beats, now)
        report = {"at": now, "ranks": states, "suspects": blame, "stacks": written}
        self.writes.replace(self.run_dir / "logs" / f"hang-{int(now)}.json", json.dumps(report, indent=2) + "\n")
        self.tell("hang", "; ".join(states) + (f". {blame}" if blame else ""), max(beat.step for beat in beats))
        self._kill(beats)

    def _ask_for_stacks(self, beats: list[Beat]) -> list[str]:
        """Ask every rank, and wait a moment for what it writes; one that the kernel has stopped cannot answer."""
        assert self.run_dir is not None
        files = {beat.rank: stacks_file(self.run_dir, beat.rank) for beat in beats}
        before = {rank: _size(path) for rank, path in files.items()}
        for beat in beats:
            _send(beat.pid, STACK_SIGNAL)
        until = time.monotonic() + STACK_SECONDS
        while time.monotonic() < until and any(_size(path) == before[rank] for rank, path in files.items()):
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)  # for the last lines
        return [str(path) for rank, path in files.items() if _size(path) > before[rank]]

    def _kill(self, beats: Sequence[Beat] = ()) -> None:
        """Everything at once: the ranks by their own ids, because launchers put them into groups of their own."""
        assert self.child is not None
        for beat in beats:
            _send(beat.pid, signal.SIGKILL)
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()

    def _be_present(self) -> None:
        """Let `headway stop` know that somebody will start the run again. A disk that cannot be written ends neither run nor supervisor."""
        if self.run_dir is not None and (self.run_dir / "logs").is_dir():
            here = {"pid": os.getpid(), "host": socket.gethostname(), "at": time.time()}
            try:
                write_atomic(self.run_dir / PRESENCE, json.dumps(here))
                self.can_write = True
            except HeadwayError as problem:
                if self.can_write:
                    self.can_write = False
                    log.warning("%s The run is supervised as before; hangs are not looked for until the disk can be written.", problem)
                    self.tell("save_failure", str(problem), max(self.furthest, 0))


class HangDetector:
    """How long the ranks here have made no progress, by what is seen to change in their heartbeats; clocks may jump.

    Time counts only as far as it was looked at: after a pause of the whole machine a rank first gets the chance to go on.
    """

    def __init__(self, hang_seconds: float, stale: Sequence[Beat] = ()) -> None:
        self.hang_seconds = hang_seconds
        self._stale = {(beat.rank, beat.pid, beat.at) for beat in stale}
        """What an earlier start has left."""
        self._silent: dict[int, tuple[object, float]] = {}
        self._looked: float | None = None

    def hung(self, beats: Sequence[Beat], *, counts: bool = True) -> list[Beat]:
        """The ranks here, if one of them has made no progress for too long; other machines have their own supervisor.

        Where the disk cannot be written (`counts` is false), heartbeats cannot either: their silence means nothing.
        """
        now = time.monotonic()
        passed = min(now - self._looked, MOST_LOOK_SECONDS) if self._looked is not None and counts else 0.0
        self._looked = now
        here = [beat for beat in beats if beat.host == socket.gethostname() and (beat.rank, beat.pid, beat.at) not in self._stale]
        for beat in here:
            mark = (beat.pid, beat.step, beat.phase, beat.progress_at)
            before, silent = self._silent.get(beat.rank, (None, 0.0))
            self._silent[beat.rank] = (mark, silent + passed if mark == before else 0.0)
        return here if any(self._silent[beat.rank][1] > self.hang_seconds and is_alive(beat) for beat in here) else []


def _left_in(outcome: Path, code: int) -> int:
    """The exit code a command left in its file, else the one it ended with."""
    try:
        text = outcome.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return code
    return int(text) if text.isdecimal() else code


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def supervise(command: Sequence[str], settings: SuperviseConfig, recipe: Recipe | None, run_dir: Path | None = None) -> int:
    """Run a command under a supervisor; returns its exit code."""
    folder = run_dir if run_dir is not None else recipe.run.folder if recipe is not None else None
    trackers = recipe.track if recipe is not None else ()
    for one in trackers:  # a missing address is refused now, not when the first message is due
        if folder is not None and (tracker := one.build_outside(folder, folder.name)) is not None:
            tracker.close()
    policy = RestartPolicy(settings.max_restarts, settings.backoff_seconds, settings.hang_seconds)
    supervisor = Supervisor(command, policy, folder, safe_environment(command, os.environ))
    if folder is not None:
        supervisor.tell = lambda event, text, step: tell_outside(trackers, folder, event, text, step, supervisor.writes)
    try:
        return supervisor.run()
    except (FileNotFoundError, PermissionError) as problem:
        raise LaunchError(f"{command[0]}: {problem.strerror}. Give a command that can be run, after --.") from None

"""Jobs that a process on this machine drives: local and ssh.

The driver (launch/driver.py) outlives the shell that submitted the job.

    headway launch ──starts──▶ driver ──supervises──▶ the command of the target
    RUN/logs/launch.log          what driver and command print
    RUN/logs/launch-state.json   written by the driver every second: who it is, state, attempt,
                                 exit code
    RUN/logs/launch-cancel.json  written by `cancel`, read by the driver: 1 = stop with a save,
                                 2 = kill

Files instead of signals: a process id may have been reused, and another host that shares the run
folder can cancel too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from headway.config.regular_file import regular_only
from headway.errors import LaunchError
from headway.launch.targets.base import (
    FINAL,
    JobHandle,
    JobStatus,
    State,
    newest_step,
    write_handle,
)
from headway.runtime.json_file import load_json
from headway.runtime.process import boot_id, process_start
from headway.runtime.run_lock import refuse_live
from headway.runtime.storage import write_atomic, writing
from headway.train.stages import steps_saved

LOG = Path("logs") / "launch.log"
STATE = Path("logs") / "launch-state.json"
CANCEL = Path("logs") / "launch-cancel.json"
STOP = 1
KILL = 2
POLL_SECONDS = 0.1
START_SECONDS = 60.0
"""How long the driver may take to write its first state."""
SILENT_SECONDS = 60.0
"""A driver on another host counts as gone if its file has not changed for this long."""
TAIL_BYTES = 1 << 20
READ_BYTES = 1 << 16
DRIVER = "headway.launch.driver"


@dataclass(frozen=True)
class DriverState:
    """The content of launch-state.json."""

    state: State
    host: str
    machine: str
    pid: int
    started: str | None
    """When the process began, in the kernel's count; with the id it names one process."""
    attempt: int = 1
    exit_code: int | None = None
    step: int | None = None
    """The newest step, if the driver knows it better than the run folder here."""
    message: str = ""

    def write(self, run_dir: Path) -> None:
        """Replace the file."""
        write_atomic(run_dir / STATE, json.dumps(asdict(self)) + "\n")

    def is_alive(self, changed: float) -> bool:
        """Whether the driver still runs; on another host, whether its file changed lately."""
        if (self.host, self.machine) != (socket.gethostname(), boot_id()):
            return time.time() - changed < SILENT_SECONDS
        # The start time too: the id of a process that has ended may be another one's now.
        start = process_start(self.pid)
        return start is not None and self.started in (None, start)


def read_state(run_dir: Path) -> tuple[DriverState, float] | None:
    """What the driver wrote and when; None before it began, or if the file is damaged."""
    path = run_dir / STATE
    try:
        fields: Any = load_json(path)
        state = DriverState(**fields)
        has_numbers = isinstance(state.pid, int) and isinstance(state.attempt, int)
        if not has_numbers or not isinstance(state.state, str):
            return None
        return state, path.stat().st_mtime
    except (OSError, ValueError, TypeError):
        return None


def cancel_level(run_dir: Path) -> int:
    """What was requested: 0 = nothing, STOP or KILL."""
    try:
        level = cast(Any, load_json(run_dir / CANCEL))["level"]
        return level if level in (STOP, KILL) else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        return STOP  # a damaged file is still a request


def recipe_words(arguments: Sequence[str]) -> list[str]:
    """The recipe and its overrides among the words after `headway train`; options follow them."""
    words: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            break
        words.append(word)
    return words


def refuse_running(run_dir: Path) -> None:
    """Refuse a run folder in which a job runs."""
    refuse_live(run_dir)
    # Between two starts of the ranks no one holds the lock: the driver waits before a restart.
    known = read_state(run_dir)
    if known is None:
        return
    driver, changed = known
    if driver.state not in FINAL and driver.is_alive(changed):
        raise LaunchError(
            f"{run_dir} is running already: process {driver.pid} on {driver.host} drives it. "
            f"Stop it with `headway launch cancel {run_dir}`, or choose another run.name."
        )


def start_driver(handle: JobHandle, environment: Mapping[str, str]) -> None:
    """Write the handle and start the driver in a session of its own; returns when it has begun."""
    run_dir = handle.run_dir
    refuse_running(run_dir)
    with writing(run_dir):
        (run_dir / LOG).parent.mkdir(parents=True, exist_ok=True)

    # What an earlier job left: its requests must not reach this one, its log is kept.
    for stale in (STATE, CANCEL):
        (run_dir / stale).unlink(missing_ok=True)
    if (run_dir / LOG).exists():
        (run_dir / LOG).rename(run_dir / LOG.with_name(f"launch-{time.time_ns()}.log"))

    write_handle(handle)
    # A session of its own: the end of this shell or terminal does not reach the driver.
    command = [sys.executable, "-P", "-m", DRIVER, str(run_dir)]
    with open(run_dir / LOG, "ab", opener=regular_only) as output:
        driver = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    # If this process outlives the driver, its end must not leave a zombie.
    threading.Thread(target=driver.wait, name="headway-reap", daemon=True).start()

    deadline = time.monotonic() + START_SECONDS
    while read_state(run_dir) is None:
        if driver.poll() is not None or time.monotonic() > deadline:
            # A driver that starts late must not run a job that was reported as failed.
            driver.kill()
            last = next(iter(tail(run_dir / LOG, 1)), "no output")
            raise LaunchError(
                f"the process that drives the job did not start: {last}. See {run_dir / LOG}."
            )
        time.sleep(POLL_SECONDS)


class DrivenTarget:
    """Status, logs and cancel of a job with a driver.

    A target adds `submit` and `command`, what the driver supervises.
    """

    detects_hangs = True
    """Whether the supervisor looks at heartbeats: the ranks are on this machine."""

    def saved_step(self, handle: JobHandle) -> int:
        """The step of the newest checkpoint; -1 without one."""
        return steps_saved(handle.run_dir)

    def step(self, handle: JobHandle) -> int | None:
        """The newest step, if it is known here otherwise than by heartbeats."""
        return None

    def status(self, handle: JobHandle) -> JobStatus:
        """From the driver's file and the heartbeats in the run folder."""
        known = read_state(handle.run_dir)
        if known is None:
            return JobStatus(
                "unknown",
                hosts=handle.hosts,
                message=f"{handle.run_dir / STATE} is missing or damaged",
            )

        driver, changed = known
        state = driver.state
        message = driver.message
        if state not in FINAL and not driver.is_alive(changed):
            state = "unknown"
            message = (
                f"the process that drives the job ({driver.pid} on {driver.host}) is gone; "
                "launch the run again to resume it"
            )
        elif state == "running" and cancel_level(handle.run_dir):
            state = "stopping"

        steps = [step for step in (newest_step(handle.run_dir), driver.step) if step is not None]
        return JobStatus(
            state,
            driver.attempt,
            handle.hosts,
            driver.exit_code,
            max(steps, default=None),
            message,
        )

    def logs(self, handle: JobHandle, *, lines: int, follow: bool) -> Iterator[str]:
        """From launch.log."""
        path = handle.run_dir / LOG
        end = 0
        if path.exists():
            end = path.stat().st_size
        yield from tail(path, lines, end)
        if follow and path.exists():
            yield from self._follow(handle, path, end)

    def _follow(self, handle: JobHandle, path: Path, position: int) -> Iterator[str]:
        with open(path, "rb", opener=regular_only) as file:
            file.seek(position)
            unfinished = b""
            while True:
                # Asked before the read, so that what was written until the end is read.
                is_over = self.status(handle).state in (*FINAL, "unknown")
                *whole, unfinished = (unfinished + _read_all(file)).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
                if is_over:
                    if unfinished:
                        yield unfinished.decode(errors="replace")
                    return
                time.sleep(POLL_SECONDS)

    def cancel(self, handle: JobHandle) -> None:
        """Leave a request for the driver; the second one kills."""
        status = self.status(handle)
        if status.state not in ("queued", "running", "stopping"):
            text = (
                f"{handle.run_dir}: the job is {status.state}, so there is nothing to cancel. "
                f"{status.message}"
            )
            raise LaunchError(text.rstrip())
        level = min(KILL, cancel_level(handle.run_dir) + 1)
        write_atomic(handle.run_dir / CANCEL, json.dumps({"level": level}) + "\n")


def tail(path: Path, lines: int, end: int | None = None) -> list[str]:
    """The last lines of a file up to a position; only its last megabyte is read."""
    if not path.exists() or lines < 1:
        return []
    with open(path, "rb", opener=regular_only) as file:
        if end is None:
            end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - TAIL_BYTES))
        text = file.read(end - file.tell()).decode(errors="replace")
    if text:
        return text.removesuffix("\n").split("\n")[-lines:]
    return []


def _read_all(file: IO[bytes]) -> bytes:
    return b"".join(iter(lambda: file.read(READ_BYTES), b""))

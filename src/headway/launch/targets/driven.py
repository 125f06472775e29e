"""Jobs that a process on this machine drives: local and ssh. The driver (launch/driver.py) outlives the shell that submitted the job.

    headway launch ──starts──▶ driver ──supervises──▶ the command of the target
    RUN/logs/launch.log          what driver and command print
    RUN/logs/launch-state.json   written by the driver every second: who it is, state, attempt, exit code
    RUN/logs/launch-cancel.json  written by `cancel`, read by the driver: 1 = stop with a save, 2 = kill

Files instead of signals: a process id may have been reused, and another host that shares the run folder can cancel too.
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
STOP, KILL = 1, 2
POLL_SECONDS = 0.1
START_SECONDS = 60.0
SILENT_SECONDS = 60.0
"""A driver on another host counts as gone if its file has not changed for this long."""
TAIL_BYTES = 1 << 20
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
        found = process_start(self.pid)
        return found is not None and self.started in (None, found)


def read_state(run_dir: Path) -> tuple[DriverState, float] | None:
    """What the driver wrote and when; None before it began, or if the file is damaged."""
    path = run_dir / STATE
    try:
        given: Any = load_json(path)
        state = DriverState(**given)
        if not (
            isinstance(state.pid, int)
            and isinstance(state.attempt, int)
            and isinstance(state.state, str)
        ):
            return None
        return state, path.stat().st_mtime
    except (OSError, ValueError, TypeError):
        return None


def cancel_level(run_dir: Path) -> int:
    """What was requested: 0 = nothing, STOP or KILL."""
    try:
        found = cast(Any, load_json(run_dir / CANCEL))["level"]
        return found if found in (STOP, KILL) else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError):
        return STOP  # someone requested something


def recipe_words(arguments: Sequence[str]) -> list[str]:
    """The recipe and its overrides among the words after `headway train`; options follow them."""
    end = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    return list(arguments[:end])


def refuse_running(run_dir: Path) -> None:
    """Refuse a run folder in which a job runs."""
    refuse_live(run_dir)
    if (
        (found := read_state(run_dir)) is not None
        and found[0].state not in FINAL
        and found[0].is_alive(found[1])
    ):
        raise LaunchError(
            f"{run_dir} is running already: process {found[0].pid} on {found[0].host} drives it. "
            f"Stop it with `headway launch cancel {run_dir}`, or choose another run.name."
        )


def start_driver(handle: JobHandle, environment: Mapping[str, str]) -> None:
    """Write the handle and start the driver in a session of its own; returns when it has begun."""
    run_dir = handle.run_dir
    refuse_running(run_dir)
    with writing(run_dir):
        (run_dir / LOG).parent.mkdir(parents=True, exist_ok=True)
    for one in (STATE, CANCEL):
        (run_dir / one).unlink(missing_ok=True)
    if (run_dir / LOG).exists():
        (run_dir / LOG).rename(
            run_dir / LOG.with_name(f"launch-{time.time_ns()}.log")
        )  # of an earlier job
    write_handle(handle)
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
    threading.Thread(target=driver.wait, name="headway-reap", daemon=True).start()
    deadline = time.monotonic() + START_SECONDS
    while read_state(run_dir) is None:
        if driver.poll() is not None or time.monotonic() > deadline:
            driver.kill()
            last = next(iter(tail(run_dir / LOG, 1)), "no output")
            raise LaunchError(
                f"the process that drives the job did not start: {last}. See {run_dir / LOG}."
            )
        time.sleep(POLL_SECONDS)


class DrivenTarget:
    """Status, logs and cancel of a job with a driver. A target adds `submit` and `command`, what the driver supervises."""

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
        found = read_state(handle.run_dir)
        if found is None:
            return JobStatus(
                "unknown",
                hosts=handle.hosts,
                message=f"{handle.run_dir / STATE} is missing or damaged",
            )
        now, changed = found
        known = [step for step in (newest_step(handle.run_dir), now.step) if step is not None]
        state, message = now.state, now.message
        if state not in FINAL and not now.is_alive(changed):
            state = "unknown"
            message = f"the process that drives the job ({now.pid} on {now.host}) is gone; launch the run again to resume it"
        elif state == "running" and cancel_level(handle.run_dir):
            state = "stopping"
        return JobStatus(
            state, now.attempt, handle.hosts, now.exit_code, max(known, default=None), message
        )

    def logs(self, handle: JobHandle, *, lines: int, follow: bool) -> Iterator[str]:
        """From launch.log."""
        path = handle.run_dir / LOG
        end = path.stat().st_size if path.exists() else 0
        yield from tail(path, lines, end)
        if follow and path.exists():
            yield from self._follow(handle, path, end)

    def _follow(self, handle: JobHandle, path: Path, at: int) -> Iterator[str]:
        with open(path, "rb", opener=regular_only) as file:
            file.seek(at)
            rest = b""
            while True:
                is_over = self.status(handle).state in (
                    *FINAL,
                    "unknown",
                )  # before the read: what was written until the end is read
                *whole, rest = (rest + _read_all(file)).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
                if is_over:
                    if rest:
                        yield rest.decode(errors="replace")
                    return
                time.sleep(POLL_SECONDS)

    def cancel(self, handle: JobHandle) -> None:
        """Leave a request for the driver; the second one kills."""
        status = self.status(handle)
        if status.state not in ("queued", "running", "stopping"):
            raise LaunchError(
                f"{handle.run_dir}: the job is {status.state}, so there is nothing to cancel. {status.message}".rstrip()
            )
        write_atomic(
            handle.run_dir / CANCEL,
            json.dumps({"level": min(KILL, cancel_level(handle.run_dir) + 1)}) + "\n",
        )


def tail(path: Path, lines: int, end: int | None = None) -> list[str]:
    """The last lines of a file up to a position; only its last megabyte is read."""
    if not path.exists() or lines < 1:
        return []
    with open(path, "rb", opener=regular_only) as file:
        stop = file.seek(0, os.SEEK_END) if end is None else end
        file.seek(max(0, stop - TAIL_BYTES))
        text = file.read(stop - file.tell()).decode(errors="replace")
    return text.removesuffix("\n").split("\n")[-lines:] if text else []


def _read_all(file: IO[bytes]) -> bytes:
    return b"".join(iter(lambda: file.read(1 << 16), b""))

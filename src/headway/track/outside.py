"""Telling from outside of a run what its own trackers cannot: a crash, a hang. Used by ranks that fail, by the launcher and the supervisor.

A crash is told once: by the first who claims it, whether that is one of many ranks, the launcher or the supervisor; the same error after a
restart of the same job is not told again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.runtime.deferred import Deferred
from headway.runtime.process import supervisor
from headway.runtime.web import job_id
from headway.track.base import Event, TrackerConfig
from headway.track.jsonl import lines_of

EVENTS = "events.jsonl"
CLAIMS = Path("logs") / "crash.json"
LAST_LINES = 10
MOST_BYTES = 1 << 20


def append_event(run_dir: Path, event: Event, text: str, step: int, writes: Deferred | None = None, **facts: Any) -> None:
    """Keep an event in the run folder: one line of JSON in events.jsonl. A run that has no folder yet has no events.

    An event that cannot be written waits in `writes`, where there is one: what is reported must not depend on a disk that may be full.
    """
    if not run_dir.is_dir():
        return
    line = json.dumps({"time": round(time.time(), 3), "event": event, "step": step, "text": text, **facts}, ensure_ascii=False)
    (writes or Deferred()).append(run_dir / EVENTS, line.encode(errors="backslashreplace") + b"\n")


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in order, one after another; lines that are none are left out."""
    try:
        with (run_dir / EVENTS).open("rb") as file:
            for line in lines_of(file):
                try:
                    found: Any = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield found
    except OSError:
        return


def tell_outside(
    configs: Sequence[TrackerConfig], run_dir: Path, event: Event, text: str, step: int = 0, writes: Deferred | None = None
) -> None:
    """Tell everybody who can be told without a run; waits a moment for messages to be on their way."""
    append_event(run_dir, event, text, step, writes)
    for config in configs:
        tracker = config.build_outside(run_dir, run_dir.name)
        if tracker is not None:
            tracker.event(event, text, step)
            tracker.close()


def tell_crash(configs: Sequence[TrackerConfig], run_dir: Path, text: str, step: int = 0) -> bool:
    """Tell a crash, unless somebody did already; returns whether it was told."""
    if not claim_crash(run_dir, text):
        return False
    tell_outside(configs, run_dir, "crash", text, step)
    return True


def last_lines(trace: str) -> str:
    """The end of a traceback, where the cause is."""
    return "\n".join(trace.rstrip().splitlines()[-LAST_LINES:])


def begin_claims(run_dir: Path) -> None:
    """A run starts: its crash may be told again, unless it is the same one in the same job. A run that never crashed has no claims."""
    path = run_dir / CLAIMS
    if not path.exists():
        return
    with _claims(run_dir) as claims:
        is_same = claims.get("job") == _job() is not None
        claims["told_this_start"] = False
    if not is_same:
        path.unlink(missing_ok=True)


def end_claims(run_dir: Path) -> None:
    """A run has ended well: no crash of it is of interest any more."""
    (run_dir / CLAIMS).unlink(missing_ok=True)


def claim_crash(run_dir: Path, text: str, job: str | None = None) -> bool:
    """Whether the caller is the one to tell this crash; `job` is its name, for a supervisor, which has it from itself."""
    if not (run_dir / "logs").is_dir():
        return True  # nobody else can know of it either
    signature = re.sub(r"\d+(\.\d+)?", "#", (text.rstrip().splitlines() or [""])[-1])
    with _claims(run_dir) as claims:
        found: Any = claims.get("told")
        told: list[Any] = found if isinstance(found, list) else []
        is_new = not claims.get("told_this_start") and signature not in told
        claims.update(job=job or claims.get("job") or _job(), told_this_start=True, told=[*told, signature] if is_new else told)
        return is_new


@contextmanager
def _claims(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The claims, read and written by one process at a time. Where the disk cannot be written they are forgotten: better told twice."""
    import fcntl

    claims: dict[str, Any] = {}
    try:
        file = (run_dir / CLAIMS).open("a+b", buffering=0)
    except OSError:
        yield claims
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            found: Any = json.loads(file.read(MOST_BYTES) or b"{}")
            claims = found if isinstance(found, dict) else {}
        except (OSError, ValueError, RecursionError):
            claims = {}
        yield claims
        try:
            file.truncate(0)
            file.write(json.dumps(claims).encode())
        except OSError:
            return


def _job() -> str | None:
    """What stays the same over the restarts of one job."""
    scheduled = job_id()
    return supervisor() or (None if scheduled == "none" else scheduled)

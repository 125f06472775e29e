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

from headway.runtime.process import supervisor
from headway.runtime.web import job_id
from headway.track.base import Event, TrackerConfig

EVENTS = "events.jsonl"
CLAIMS = Path("logs") / "crash.json"
LAST_LINES = 10


def append_event(run_dir: Path, event: Event, text: str, step: int, **facts: Any) -> None:
    """Keep an event in the run folder: one line of JSON in events.jsonl. A run that has no folder yet has no events."""
    if not run_dir.is_dir():
        return
    line = json.dumps({"time": round(time.time(), 3), "event": event, "step": step, "text": text, **facts}, ensure_ascii=False)
    try:
        with (run_dir / EVENTS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return  # what is told must not depend on a disk that may be the trouble


def tell_outside(configs: Sequence[TrackerConfig], run_dir: Path, event: Event, text: str, step: int = 0) -> None:
    """Tell everybody who can be told without a run; waits a moment for messages to be on their way."""
    append_event(run_dir, event, text, step)
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
    """A run starts: its crash may be told again, unless it is the same one in the same job."""
    with _claims(run_dir) as claims:
        job = _job()
        if job is None or claims.get("job") != job:
            claims.clear()
        claims.update(job=job, told_this_start=False)


def claim_crash(run_dir: Path, text: str) -> bool:
    """Whether the caller is the one to tell this crash."""
    if not (run_dir / "logs").is_dir():
        return True  # nobody else can know of it either
    signature = re.sub(r"\d+(\.\d+)?", "#", (text.rstrip().splitlines() or [""])[-1])
    with _claims(run_dir) as claims:
        told: list[str] = claims.setdefault("told", [])
        is_new = not claims.get("told_this_start") and signature not in told
        claims["told_this_start"] = True
        if is_new:
            told.append(signature)
        return is_new


@contextmanager
def _claims(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The claims, read and written by one process at a time."""
    import fcntl

    with (run_dir / CLAIMS).open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            claims: dict[str, Any] = json.loads(file.read() or "{}")
        except ValueError:
            claims = {}
        yield claims
        file.seek(0)
        file.truncate()
        file.write(json.dumps(claims))


def _job() -> str | None:
    """What stays the same over the restarts of one job."""
    scheduled = job_id()
    return supervisor() or (None if scheduled == "none" else scheduled)

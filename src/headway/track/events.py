"""events.jsonl, and alerts sent by a process other than the training loop: a failing rank, the
launcher or the supervisor.

A crash is reported once: by the first process that claims it. The same error after a restart of the
same job is not reported again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.config.regular_file import regular_only
from headway.runtime.deferred import Deferred
from headway.runtime.process import supervisor
from headway.runtime.web import job_id
from headway.track.base import Event, TrackerConfig
from headway.track.metrics_file import read_lines

EVENTS = "events.jsonl"
CLAIMS = Path("logs") / "crash.json"
"""Which crashes of a job were reported: `told` has their signatures."""
LAST_LINES = 10
"""Of a traceback, in a message."""
MAX_CLAIM_BYTES = 1 << 20


def append_event(
    run_dir: Path, event: Event, text: str, step: int, writes: Deferred | None = None, **facts: Any
) -> None:
    """Append an event to events.jsonl as one line of JSON.

    Does nothing before the run folder exists.

    If the line cannot be written (a full disk), it waits in `writes`: reporting an event must never
    fail.
    """
    if not run_dir.is_dir():
        return
    record = {
        "time": round(time.time(), 3),
        "event": event,
        "step": step,
        "text": text,
        **facts,
    }
    # A text of another program may hold what UTF-8 cannot encode.
    line = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
    (writes or Deferred()).append(run_dir / EVENTS, line)


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in order. Lines that are not JSON objects are skipped."""
    try:
        with open(run_dir / EVENTS, "rb", opener=regular_only) as file:
            for line in read_lines(file):
                try:
                    event: Any = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict):
                    yield event
    except OSError:
        return


def report_event(
    configs: Sequence[TrackerConfig],
    run_dir: Path,
    event: Event,
    text: str,
    step: int = 0,
    writes: Deferred | None = None,
) -> None:
    """Record an event and send it through every tracker that works without a run.

    Waits briefly for the messages to be sent.
    """
    # The file first: it needs no network.
    append_event(run_dir, event, text, step, writes)
    for config in configs:
        tracker = config.build_outside(run_dir, run_dir.name)
        if tracker is not None:
            tracker.event(event, text, step)
            tracker.close()


def send_crash_alert(
    configs: Sequence[TrackerConfig], run_dir: Path, text: str, step: int = 0
) -> bool:
    """Report a crash unless another process already did; returns whether it was reported."""
    if not claim_crash_report(run_dir, text):
        return False
    report_event(configs, run_dir, "crash", text, step)
    return True


def traceback_tail(trace: str) -> str:
    """The last lines of a traceback, which name the cause."""
    return "\n".join(trace.rstrip().splitlines()[-LAST_LINES:])


def reset_crash_report(run_dir: Path) -> None:
    """At the start of a run, allow its next crash to be reported.

    A restart of the same job remembers the crashes reported before.
    """
    path = run_dir / CLAIMS
    if not path.exists():
        return
    job = _job()
    with _claims(run_dir) as claims:
        is_same_job = job is not None and claims.get("job") == job
        claims["told_this_start"] = False
    if not is_same_job:
        path.unlink(missing_ok=True)


def clear_crash_report(run_dir: Path) -> None:
    """At the successful end of a run, forget its reported crashes."""
    (run_dir / CLAIMS).unlink(missing_ok=True)


def claim_crash_report(run_dir: Path, text: str, job: str | None = None) -> bool:
    """Whether the caller must report this crash.

    A supervisor passes its own `job`; other processes read theirs from the environment.
    """
    # Without the folder no other process can have claimed it.
    if not (run_dir / "logs").is_dir():
        return True

    # The last line names the error. Its numbers (steps, ranks, bytes) differ from start to start.
    lines = text.rstrip().splitlines()
    last_line = lines[-1] if lines else ""
    signature = re.sub(r"\d+(\.\d+)?", "#", last_line)
    with _claims(run_dir) as claims:
        stored: Any = claims.get("told")
        reported: list[Any] = stored if isinstance(stored, list) else []
        # One report per start, whatever the ranks say, and one per error over all starts.
        is_new = not claims.get("told_this_start") and signature not in reported
        if is_new:
            reported = [*reported, signature]
        claims.update(job=job or claims.get("job") or _job(), told_this_start=True, told=reported)
        return is_new


@contextmanager
def _claims(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The claims file, locked for one process at a time.

    If the disk cannot be written, claims are lost: a second report beats none.
    """
    import fcntl

    claims: dict[str, Any] = {}
    try:
        file = open(run_dir / CLAIMS, "a+b", buffering=0, opener=regular_only)  # noqa: SIM115
    except OSError:
        yield claims
        return
    with file:
        # Ranks that fail together come here at the same moment. Closing the file unlocks it.
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            content: Any = json.loads(file.read(MAX_CLAIM_BYTES) or b"{}")
            claims = content if isinstance(content, dict) else {}
        except (OSError, ValueError, RecursionError):
            claims = {}
        yield claims
        try:
            file.truncate(0)
            file.write(json.dumps(claims).encode())
        except OSError:
            return


def _job() -> str | None:
    """A name that stays the same when a job restarts; None without a supervisor or scheduler."""
    supervised = supervisor()
    if supervised:
        return supervised
    scheduled = job_id()
    return None if scheduled == "none" else scheduled

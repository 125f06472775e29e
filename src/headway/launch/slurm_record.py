"""What a SLURM job leaves about itself: RUN/launch/slurm-JOB.json, one entry per start of the job.

    start 1   step -1 ──▶ 120   queued again (time limit)
    start 2   step 120 ─▶ 300   done

It outlives the queue's memory, so that the status of an old job is known on a cluster without
accounting, and it tells a start whether the ones before it got anywhere. A damaged file counts as
none.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from headway.errors import HeadwayError
from headway.runtime.json_file import load_json
from headway.runtime.storage import write_atomic, writing

log = logging.getLogger("headway")

FOLDER = "launch"
Outcome = Literal["done", "failed", "cancelled", "stopped", "requeued"]


@dataclass(frozen=True)
class JobStart:
    """One start of a job."""

    at: float
    """When it began, in seconds since 1970."""
    hosts: str
    step: int
    """The newest saved step when it began; -1 = none."""
    step_after: int | None = None
    outcome: Outcome | None = None
    """None while it runs, or if it was killed."""
    exit_code: int | None = None
    message: str = ""


def record_file(run_dir: Path, job: str) -> Path:
    """The record of a job; an element of an array has its own."""
    return run_dir / FOLDER / f"slurm-{job}.json"


def cancel_file(run_dir: Path, job: str) -> Path:
    """Exists once a stop with a save was requested."""
    return run_dir / FOLDER / f"slurm-{job}.cancelled"


def read_starts(run_dir: Path, job: str) -> list[JobStart]:
    """The starts of a job so far."""
    try:
        return [JobStart(**start) for start in load_json(record_file(run_dir, job))["starts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # no record yet, or a damaged one


def write_starts(run_dir: Path, job: str, starts: Sequence[JobStart]) -> None:
    """Replace the record. A disk that cannot be written ends no job."""
    path = record_file(run_dir, job)
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path, json.dumps({"starts": [asdict(start) for start in starts]}, indent=2) + "\n"
        )
    except HeadwayError as problem:
        log.warning("%s The job continues without its record.", problem)


def begin(run_dir: Path, job: str, hosts: str, step: int) -> list[JobStart]:
    """Add a start; returns all, this one last."""
    # Written before the ranks start: a start that is killed counts too.
    starts = [*read_starts(run_dir, job), JobStart(time.time(), hosts, step)]
    write_starts(run_dir, job, starts)
    return starts


def end(run_dir: Path, job: str, starts: Sequence[JobStart], completed: JobStart) -> None:
    """Replace the newest start by what is known of it at its end."""
    write_starts(run_dir, job, [*starts[:-1], replace(completed, at=starts[-1].at)])


def fruitless(starts: Sequence[JobStart]) -> int:
    """How many starts before the newest one saved nothing newer, in a row."""
    # A start that began with an older checkpoint has saved a newer one since.
    step = starts[-1].step
    count = 0
    for start in reversed(starts[:-1]):
        if start.step < step:
            break
        count += 1
    return count

"""When a run fails: an error comes in, one that names the rank at fault goes out, and an alert is sent.

A rank that headway's launcher started leaves the alert to the launcher, which alone sees ranks that were killed.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import CommunicationError, HeadwayError
from headway.runtime.heartbeat import (
    WRITE_SECONDS,
    Beat,
    Heartbeat,
    is_alive,
    is_lost,
    read_beats,
    suspects,
)
from headway.runtime.process import failure_file
from headway.runtime.storage import write_atomic
from headway.track.events import send_crash_alert, traceback_tail

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")


def explain_lost_ranks(error: Exception, heart: Heartbeat, run_dir: Path, world: int) -> Exception:
    """The same error, or, where ranks lost each other, one that says which rank waited in which exchange, and for whom."""
    if world == 1 or not (
        isinstance(error, CommunicationError)
        or (not isinstance(error, HeadwayError) and is_lost(error))
    ):
        return error
    known = error if isinstance(error, CommunicationError) else heart.lost(error)
    _save_exchanges(heart, run_dir)
    time.sleep(2 * WRITE_SECONDS)  # until the others have written their heartbeats
    return CommunicationError(
        f"{str(known).rstrip('.')}. {_lost_or_late(read_beats(run_dir), heart.rank)}".rstrip()
    )


def _lost_or_late(beats: list[Beat], rank: int) -> str:
    """One sentence: which other ranks are gone, or else behind."""
    now = time.time()
    gone = [beat for beat in beats if beat.rank != rank and not is_alive(beat)]
    if gone:
        return "Gone: " + "; ".join(beat.describe(now) for beat in gone) + "."
    return suspects(beats, now)


def _save_exchanges(heart: Heartbeat, run_dir: Path) -> None:
    """Write this rank's last exchanges, for comparing ranks by hand; works with every backend."""
    if (run_dir / "logs").is_dir():
        recent = [{"at": at, "number": number, "name": name} for at, number, name in heart.recent]
        write_atomic(
            run_dir / "logs" / f"exchanges-rank-{heart.rank:05}.json",
            json.dumps(recent, indent=1) + "\n",
        )


def report_crash(recipe: Recipe, error: Exception, step: int) -> None:
    """Send a crash alert with the end of the traceback, unless headway's launcher does."""
    if failure_file() is not None or (isinstance(error, HeadwayError) and error.exit_code == 2):
        return
    text = (
        str(error)
        if isinstance(error, HeadwayError)
        else traceback_tail("".join(traceback.format_exception(error)))
    )
    try:
        send_crash_alert(recipe.track, recipe.run.folder, text, step)
    except (OSError, HeadwayError) as problem:
        log.warning("the crash alert could not be sent: %s", problem)

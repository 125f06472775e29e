"""When a run fails: an error comes in, one that names the rank at fault goes out, and an alert is
sent.

A rank that headway's launcher started leaves the alert to the launcher, which alone sees ranks that
were killed.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import CommunicationError, ConfigError, HeadwayError
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
    """The same error, or one that says which ranks lost each other.

    The new error names the rank that waited, the exchange it waited in, and whom it waited for.
    """
    if world == 1:
        return error
    if isinstance(error, CommunicationError):
        lost = error
    elif not isinstance(error, HeadwayError) and is_lost(error):
        # An error of the backend, which names no exchange; the heartbeat knows the last one.
        lost = heart.lost(error)
    else:
        return error

    _save_exchanges(heart, run_dir)
    # Until the others have written their heartbeats, or have failed to.
    time.sleep(2 * WRITE_SECONDS)
    others = _lost_or_late(read_beats(run_dir), heart.rank)
    return CommunicationError(f"{str(lost).rstrip('.')}. {others}".rstrip())


def _lost_or_late(beats: list[Beat], rank: int) -> str:
    """One sentence: which other ranks are gone, or else behind."""
    now = time.time()
    gone = [beat for beat in beats if beat.rank != rank and not is_alive(beat)]
    if gone:
        return "Gone: " + "; ".join(beat.describe(now) for beat in gone) + "."
    return suspects(beats, now)


def _save_exchanges(heart: Heartbeat, run_dir: Path) -> None:
    """Write this rank's last exchanges, for comparing ranks by hand; works with every backend."""
    logs = run_dir / "logs"
    # A run that fails before it begins has no folder, and gets none.
    if not logs.is_dir():
        return
    recent = [
        {"at": seconds, "number": number, "name": name} for seconds, number, name in heart.recent
    ]
    path = logs / f"exchanges-rank-{heart.rank:05}.json"
    write_atomic(path, json.dumps(recent, indent=1) + "\n")


def report_crash(recipe: Recipe, error: Exception, step: int) -> None:
    """Send a crash alert with the end of the traceback, unless headway's launcher does."""
    if failure_file() is not None:
        return
    # A mistake in the recipe is answered on the screen; nobody is woken for it.
    if isinstance(error, HeadwayError) and error.exit_code == ConfigError.exit_code:
        return
    # Our errors say what to do. Of others the place matters, which only the traceback has.
    if isinstance(error, HeadwayError):
        text = str(error)
    else:
        text = traceback_tail("".join(traceback.format_exception(error)))
    try:
        send_crash_alert(recipe.track, recipe.run.folder, text, step)
    except (OSError, HeadwayError) as problem:
        log.warning("the crash alert could not be sent: %s", problem)

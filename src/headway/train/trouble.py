"""When a run fails: what is known about it is gathered, explained in one error, and told.

A rank that headway's launcher started leaves the telling to it, because it alone sees ranks that were killed.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import CommunicationError, HeadwayError
from headway.runtime.heartbeat import WRITE_SECONDS, Beat, Heartbeat, is_alive, is_lost, read_beats, suspects
from headway.runtime.process import failure_file
from headway.runtime.storage import write_atomic
from headway.track.outside import last_lines, tell_crash

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")


def explained(error: Exception, heart: Heartbeat, run_dir: Path, world: int) -> Exception:
    """The same error, or, where ranks lost each other, one that says which rank waited in what, and for whom."""
    if world == 1 or not (isinstance(error, CommunicationError) or (not isinstance(error, HeadwayError) and is_lost(error))):
        return error
    known = error if isinstance(error, CommunicationError) else heart.lost(error)
    _keep_collectives(heart, run_dir)
    time.sleep(2 * WRITE_SECONDS)  # until the others have written where they are
    return CommunicationError(f"{str(known).rstrip('.')}. {whom_they_wait_for(read_beats(run_dir), heart.rank)}".rstrip())


def whom_they_wait_for(beats: list[Beat], asking: int | None = None) -> str:
    """Which ranks are gone, or else behind; as a sentence."""
    now = time.time()
    gone = [beat for beat in beats if beat.rank != asking and not is_alive(beat)]
    if gone:
        return "Gone: " + "; ".join(beat.describe(now) for beat in gone) + "."
    return suspects(beats, now)


def _keep_collectives(heart: Heartbeat, run_dir: Path) -> None:
    """This rank's last exchanges, for comparing ranks by hand; works with every backend."""
    if (run_dir / "logs").is_dir():
        recent = [{"at": at, "number": number, "name": name} for at, number, name in heart.recent]
        write_atomic(run_dir / "logs" / f"exchanges-rank-{heart.rank:05}.json", json.dumps(recent, indent=1) + "\n")


def tell_of_crash(recipe: Recipe, error: Exception, step: int) -> None:
    """Tell a crash, with the end of its traceback, where no launcher of ours will."""
    if failure_file() is not None or (isinstance(error, HeadwayError) and error.exit_code == 2):
        return
    text = str(error) if isinstance(error, HeadwayError) else last_lines("".join(traceback.format_exception(error)))
    try:
        tell_crash(recipe.track, recipe.run.folder, text, step)
    except (OSError, HeadwayError) as problem:
        log.warning("the crash could not be told: %s", problem)

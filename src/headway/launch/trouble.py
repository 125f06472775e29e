"""What the launcher says when its ranks have failed: where each of them was, and who is told."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from headway.errors import HeadwayError
from headway.launch.failure import USERS_MISTAKE, RankError
from headway.runtime.heartbeat import read_beats
from headway.track.outside import last_lines, tell_crash

if TYPE_CHECKING:
    from headway.train.config import Recipe

log = logging.getLogger("headway")


def tell_failure(recipe: Recipe, error: RankError) -> None:
    """Log where every rank was when it last said so, and tell the crash, once, with the end of its traceback."""
    if error.exit_code == USERS_MISTAKE:
        return
    beats, now = read_beats(recipe.run.folder), time.time()
    for beat in beats:
        log.info("last seen: %s", beat.describe(now))
    text = f"{last_lines(error.traceback)}\n{error}" if error.traceback else str(error)
    try:
        tell_crash(recipe.track, recipe.run.folder, text, max((beat.step for beat in beats), default=0))
    except (OSError, HeadwayError) as problem:
        log.warning("the crash could not be told: %s", problem)

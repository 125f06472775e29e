"""A lock file on a shared disk: one process does the work while the others wait.

The owner touches the file every few seconds. A lock not touched for long belongs to a dead process
and is taken over. What is built under a lock must still appear by one atomic rename: if two
processes ever own the lock, they do the same work twice, without harm.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TOUCH_SECONDS = 2.0
STALE_SECONDS = 60.0
"""Many times TOUCH_SECONDS: a shared disk may hang for a while."""
POLL_SECONDS = 0.2


@contextmanager
def file_lock(
    path: Path, until: Callable[[], bool], stale_seconds: float = STALE_SECONDS
) -> Iterator[bool]:
    """Wait until this process owns the lock (True), or until `until` reports that another process
    has done the work (False)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not _acquire(path, until, stale_seconds):
        yield False
        return
    done = threading.Event()

    def touch() -> None:
        while not done.wait(TOUCH_SECONDS):
            # Another process took the lock for stale and removed it.
            with suppress(FileNotFoundError):
                os.utime(path)

    toucher = threading.Thread(target=touch, name="headway-lock", daemon=True)
    toucher.start()
    try:
        # Another process may have finished between the last look and the lock.
        yield not until()
    finally:
        done.set()
        toucher.join()
        path.unlink(missing_ok=True)


def _acquire(path: Path, until: Callable[[], bool], stale_seconds: float) -> bool:
    log = logging.getLogger("headway")
    # The time of the lock's last touch, and when we saw it first. Only our own clock measures how
    # long ago that was: clocks of machines differ.
    last_touch: float | None = None
    first_seen = 0.0
    logged = False
    while not until():
        # O_EXCL makes creating the file the one atomic step that decides who owns it.
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            pass
        try:
            touched = path.stat().st_mtime
        except FileNotFoundError:
            continue
        now = time.monotonic()
        if last_touch != touched:
            last_touch = touched
            first_seen = now
        elif now - first_seen > stale_seconds:
            log.info("%s: lock not renewed for %.0f s; taking it over", path, stale_seconds)
            path.unlink(missing_ok=True)
            last_touch = None
            continue
        if not logged:
            log.info("waiting for another process that owns %s", path)
            logged = True
        time.sleep(POLL_SECONDS)
    return False

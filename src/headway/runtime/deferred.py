"""Writes whose failure must not end a run: lines and small files that cannot be written now wait in
memory and are retried, in order.

    append(metrics.jsonl, line) ──▶ written immediately; while the disk is full: [line][line][line]
                                    ──▶ written in order when there is room
    replace(heal.json, content) ──▶ as well; of several contents that wait the newest is enough

What waits is bounded: beyond the bound the oldest lines are lost, which is reported. A line reaches
the file whole or not at all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from headway.config.regular_file import regular_only
from headway.errors import HeadwayError
from headway.runtime.storage import explain, write_atomic

log = logging.getLogger("headway")

MAX_WAITING_BYTES = 64 << 20
"""How much may wait in memory before the oldest lines are lost."""
RETRY_SECONDS = 1.0
"""How long nothing is tried after a failure: steps may be many a second."""


class Deferred:
    """The files of one run, or of one process that watches it.

    Any thread may call it; nothing it does raises an error of the disk.
    """

    def __init__(
        self, limit_bytes: int = MAX_WAITING_BYTES, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self.limit_bytes = limit_bytes
        self.retry_seconds = retry_seconds
        self.report: Callable[[str], None] = lambda text: None
        """Called once when writing begins to fail."""
        self.recovered: Callable[[str], None] = lambda text: log.warning("%s", text)
        """Called once when writing succeeds again."""
        self.lost_lines = 0
        self._lines: dict[Path, deque[bytes]] = {}
        """Lines that wait, by file."""
        self._whole: dict[Path, bytes] = {}
        """Contents that wait, by file."""
        self._bytes = 0
        """Of all lines that wait."""
        self._failing = False
        self._retry_at = 0.0
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        """Lines and files that are not on the disk yet."""
        return sum(len(lines) for lines in self._lines.values()) + len(self._whole)

    def append(self, path: Path, line: bytes) -> None:
        """Add a line, with its end, to a file; after those that wait for the same file."""
        with self._lock:
            self._lines.setdefault(path, deque()).append(line)
            self._bytes += len(line)
            self._forget_oldest()
        # While the disk fails, a step does not try each time.
        self.retry(now=not self._failing)

    def replace(self, path: Path, content: bytes | str) -> None:
        """Give a small file a new content, whole or not at all."""
        with self._lock:
            self._whole[path] = content.encode() if isinstance(content, str) else content
        self.retry(now=not self._failing)

    def drop(self, path: Path, unwanted: Callable[[bytes], bool]) -> None:
        """Forget lines that wait for a file."""
        with self._lock:
            waiting = self._lines.get(path, ())
            wanted = deque(line for line in waiting if not unwanted(line))
            self._bytes += sum(map(len, wanted)) - sum(map(len, waiting))
            self._lines[path] = wanted

    def retry(self, *, now: bool = True) -> bool:
        """Write what waits, `now` or, after a failure, once some time has passed.

        Returns whether nothing waits any more.
        """
        with self._lock:
            if not self.waiting:
                return True
            if not now and time.monotonic() < self._retry_at:
                return False

            problem = self._write_all()
            began_to_fail = problem is not None and not self._failing
            has_recovered = problem is None and self._failing
            self._failing = problem is not None
            self._retry_at = time.monotonic() + self.retry_seconds

            num_lost = 0
            if has_recovered:
                num_lost = self.lost_lines
                self.lost_lines = 0

        # Outside of the lock: what is called may write a line about it.
        if began_to_fail:
            self.report(
                f"{problem} Lines are kept in memory and written once the disk accepts them; "
                "training continues."
            )
        if has_recovered:
            exception = f" except {num_lost}" if num_lost else ""
            self.recovered(
                f"the disk can be written again; all pending lines were written{exception}"
            )
        return problem is None

    def _write_all(self) -> str | None:
        """Why something could not be written; None if all was."""
        for path, lines in self._lines.items():
            # A line leaves the queue only when it is in the file: the order holds.
            while lines:
                try:
                    append_whole(path, lines[0])
                except OSError as problem:
                    return f"{path}: {explain(problem, path, self._bytes)}"
                self._bytes -= len(lines.popleft())
        for path in list(self._whole):
            try:
                write_atomic(path, self._whole[path])
            except HeadwayError as problem:
                return str(problem)
            del self._whole[path]
        return None

    def _forget_oldest(self) -> None:
        """Stay within the limit; the file with the most lines loses first."""
        while self._bytes > self.limit_bytes:
            # Each line is small, so that the longest queue is about the largest.
            longest = max(self._lines.values(), key=len)
            self._bytes -= len(longest.popleft())
            self.lost_lines += 1


def append_whole(path: Path, line: bytes) -> None:
    """Append bytes to a file, all or none: what a full disk takes only a part of is taken back."""
    with open(path, "ab", buffering=0, opener=regular_only) as file:
        begin = file.seek(0, os.SEEK_END)
        try:
            written = file.write(line)
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            # Half a line would be glued to the next one.
            if os.fstat(file.fileno()).st_size > begin:
                file.truncate(begin)
            raise

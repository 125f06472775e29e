"""The most memory a process allocates while something runs: anonymous pages, without those of mapped files."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import TracebackType


def anonymous_bytes() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class MemoryPeak:
    """Watches in a thread; `extra` is the peak above the beginning."""

    extra: int = 0

    def __enter__(self) -> MemoryPeak:
        gc.collect()
        self._begin = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.extra = max(self.extra, anonymous_bytes() - self._begin)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

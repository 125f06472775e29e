"""Death at the n-th change of the file system below a folder: that change and all later ones do not happen."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.runtime import storage


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.symlink", "os.rmdir", "shutil.rmtree")
watch: Callable[[str, tuple[object, ...]], None] | None = None


def audit(event: str, arguments: tuple[object, ...]) -> None:
    if watch is not None:
        watch(event, arguments)


sys.addaudithook(audit)


@contextmanager
def killed_at(
    call: int, folder: Path, die: Callable[[str], None] | None = None
) -> Iterator[list[str]]:
    """The process dies at the n-th change of the file system below `folder`: that one and all later ones fail. Yields what was called.

    `die` may be a real death; without it an exception that nothing catches stands for it.
    """
    global watch
    calls: list[str] = []

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        reads = event == "open" and isinstance(arguments[1], str) and "r" in arguments[1]
        if event in EVENTS and not reads and str(folder) in str(arguments[:2]):
            calls.append(event)
            if len(calls) > call:
                if die is not None:
                    die(event)
                raise Killed(event)

    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        on_event("open", (folder, "w"))
        real_fsync(descriptor)

    storage.os.fsync = fsync
    watch = on_event
    try:
        yield calls
    finally:
        storage.os.fsync = real_fsync
        watch = None

"""Unique temporary names, and the removal of what dead processes left under theirs.

    .tmp-final-3f2a91c0.4711.88213.9be01c2d
               where    pid  start random

`where` stands for the system and the namespace that process ids count in: a container gives the
same ids again and again, other machines use them too. A process is known to be dead only where its
ids can be looked up; elsewhere its files are removed after a day.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headway.runtime.process import boot_id, process_start

TEMPORARY_PREFIX = ".tmp-"
LOCK_PREFIX = ".tmp-lock-"
"""For a process that waits for the folder's lock; the folder may belong to another process."""
LEFT_SECONDS = 24 * 3600.0
"""How old something must be to be a leftover where it is not known whether its writer is alive."""
LONGEST_NAME = 150
"""Characters of the target's name in a temporary one: file systems take 255 bytes in all."""
WRITER = r"([0-9a-f]{8})\.(\d+)\.(\d+)\.[0-9a-f]{8}"
"""Matches `writer()`: where, process id, start, random."""


def temporary_name(target: Path) -> Path:
    """A name for what is to become `target`, in the same folder; never given before."""
    return target.with_name(f"{TEMPORARY_PREFIX}{target.name[:LONGEST_NAME]}-{writer()}")


def writer() -> str:
    """This process, as a part of a name."""
    return f"{_machine_id()}.{os.getpid()}.{_started(os.getpid())}.{secrets.token_hex(4)}"


def clear_leftovers(target: Path) -> None:
    """Remove what dead processes left on their way to `target`."""
    # A number alone after the name does not say who wrote it: there the age decides.
    begin = re.escape(f"{TEMPORARY_PREFIX}{target.name[:LONGEST_NAME]}")
    pattern = re.compile(rf"{begin}-(?:{WRITER}|\d+)")
    for path in _entries(target.absolute().parent):
        match = pattern.fullmatch(path.name)
        if match and _is_leftover(path, match):
            remove(path)


def clear_temporary(folder: Path) -> None:
    """Remove everything temporary in a folder that is this process's alone."""
    for path in _entries(folder):
        # Another process may be about to take the lock.
        if path.name.startswith(TEMPORARY_PREFIX) and not path.name.startswith(LOCK_PREFIX):
            remove(path)


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A private folder in the system's temporary folder.

    Removed at the end, or by a later process if this one is killed.
    """
    folder = make_temporary_folder(kind)
    try:
        yield folder
    finally:
        remove(folder)


def make_temporary_folder(kind: str) -> Path:
    """Like `temporary_folder`, for a caller who removes it.

    The name cannot be guessed, so that no one can plant a link there.
    """
    pattern = re.compile(rf"headway-{re.escape(kind)}-{WRITER}-\w+")
    for path in _entries(Path(tempfile.gettempdir())):
        match = pattern.fullmatch(path.name)
        if match and _is_ours(path) and _is_leftover(path, match):
            remove(path)
    return Path(tempfile.mkdtemp(prefix=f"headway-{kind}-{writer()}-"))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all it holds.

    What is gone already or cannot be removed stays out of the way of work.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _is_ours(path: Path) -> bool:
    """Whether it is a real folder of this user; others write to the temporary folder too."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _is_leftover(path: Path, match: re.Match[str]) -> bool:
    """Whether the process in the name is dead; where that is unknown, whether the path is old."""
    where, pid, start = match.groups()
    if where == _machine_id() and start != "0":
        return _started(int(pid)) != start
    # The time of the file system, not of this machine: two clocks need not agree.
    now = _newest(path.parent)
    return now - _newest(path) > LEFT_SECONDS


def _newest(path: Path) -> float:
    """When a file or folder, or an entry directly in it, last changed."""
    try:
        # A write to a file does not change the time of its folder.
        inside = []
        if path.is_dir() and not path.is_symlink():
            inside = [entry.stat().st_mtime for entry in path.iterdir()]
        return max([path.lstat().st_mtime, *inside])
    except OSError:
        return 0.0


def _machine_id() -> str:
    """The system since it was started, and the namespace of process ids."""
    return hashlib.sha256((boot_id() or socket.gethostname()).encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """When a process was started, in the system's count.

    0 where there is no such process, or the system does not say.
    """
    return process_start(pid) or "0"

"""A disk of a few kilobytes: a forked process with a mount of its own, which nobody else sees and which goes with it."""

import contextlib
import ctypes
import io
import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

NEW_MOUNTS = 0x00020000
NEW_USER = 0x10000000
PRIVATE = 1 << 18 | 1 << 14


class Ended(NamedTuple):
    """How a command on the small disk ended, and what it left there."""

    code: int
    stderr: str
    left: list[str]


def on_small_disk(folder: Path, kilobytes: int, commands: Sequence[Sequence[str]]) -> list[Ended]:
    """Run commands of headway, each with an empty disk at `place`."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as results:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if not _own_mounts():
                    os._exit(77)
                ended = [_ended(folder, kilobytes, command) for command in commands]
                results.write(pickle.dumps(ended))
                results.flush()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 77:
            pytest.skip("this system lets a process have no mounts of its own")
        assert status == 0
        results.seek(0)
        return pickle.loads(results.read())  # our own, written a moment ago


def _own_mounts() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    user = os.getuid()
    group = os.getgid()
    if libc.unshare(NEW_MOUNTS | (NEW_USER if user else 0)) != 0:
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return libc.mount(b"none", b"/", None, PRIVATE, None) == 0


def _ended(folder: Path, kilobytes: int, command: Sequence[str]) -> Ended:
    from headway.cli import main

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, f"size={kilobytes}k".encode()) != 0:
        os._exit(77)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(list(command))
        except SystemExit as end:
            code = end.code
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    libc.umount2(str(folder).encode(), 2)
    return Ended(int(code or 0), said.getvalue(), left)

"""One process at a time in a folder: a lock file that says who holds it and shows that the holder
still lives.

    RUN/lock.json   {"token": "...", "host": "node7", "pid": 4711, "since": 1763200000.0, ...}
                    the time of its last change moves every 2 s

A holder on this machine is dead when its process is gone (the process id and the start time both
count, because ids repeat), and its lock is taken over at once. A holder on another host or in
another container cannot be checked directly: it is alive if its lock file changes while we wait,
and dead if the file does not change for `takeover_seconds` of our monotonic clock. Clocks are never
compared.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from headway.config.regular_file import regular_only
from headway.errors import ConfigError
from headway.runtime.process import boot_id, process_start
from headway.runtime.storage import check_writable, missing_folders, remove_empty, writing
from headway.runtime.temporary import LOCK_PREFIX

log = logging.getLogger("headway")

LOCK = "lock.json"
LARGEST_LOCK_BYTES = 1 << 16
BEAT_SECONDS = 2.0
"""How often the holder touches its lock file."""
POLL_SECONDS = 0.1
"""How often a start that waits looks at the lock file."""
SETTLE_SECONDS = 1.0
"""How long a take-over waits for other starts where the file system cannot lock a folder."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    token: str
    """A random name of this lock, by which a process knows its own."""
    host: str
    machine: str
    """The boot of the machine and the space its process ids belong to: within it, a process id
    means one process.
    """
    pid: int
    started: str | None
    """When the process began, in the kernel's count; with the id it names one process for ever."""
    since: float

    def is_alive(self) -> bool | None:
        """Whether the process lives; None where it cannot be looked at from here."""
        if not self.machine or (self.host, self.machine) != (socket.gethostname(), boot_id()):
            return None
        if self.started is not None:
            return process_start(self.pid) == self.started

        # Without start times (macOS) a process of this id may be another one.
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return None

    def describe(self) -> str:
        """Who, where and since when."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {when}"


class LockState(NamedTuple):
    """What a lock file says."""

    holder: Holder | None
    """None: the file is damaged."""
    changed_ns: int
    """When the file last changed, by the clock of the file system."""

    @property
    def token(self) -> str:
        """The token of the holder; empty where the file is damaged."""
        if self.holder is None:
            return ""
        return self.holder.token


def this_process() -> Holder:
    """This process as a holder."""
    pid = os.getpid()
    return Holder(
        uuid.uuid4().hex, socket.gethostname(), boot_id(), pid, process_start(pid), time.time()
    )


def read_holder(path: Path) -> LockState | None:
    """Who holds a lock and when its file last changed; None where there is no lock."""
    try:
        # Opened again each time, so that a network file system queries its server.
        with open(path, "rb", opener=regular_only) as file:
            content = file.read(LARGEST_LOCK_BYTES)
            changed_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None

    try:
        fields: Any = json.loads(content)
        started = fields["started"]
        holder = Holder(
            token=str(fields["token"]),
            host=str(fields["host"]),
            machine=str(fields["machine"]),
            pid=int(fields["pid"]),
            started=None if started is None else str(started),
            since=float(fields["since"]),
        )
        return LockState(holder, changed_ns)
    except (ValueError, KeyError, TypeError, RecursionError):
        return LockState(None, changed_ns)


def refuse_live(folder: Path) -> None:
    """Refuse a folder whose holder is a living process of this machine.

    One elsewhere is for `RunLock.take` to judge, which takes time.
    """
    state = read_holder(folder / LOCK)
    if state is not None and state.holder is not None and state.holder.is_alive():
        raise _in_use(folder, state.holder)


def _in_use(folder: Path, holder: Holder | None) -> ConfigError:
    description = "another process"
    if holder is not None:
        description = holder.describe()
    return ConfigError(
        f"{folder} is in use by {description}. Stop that one first (headway stop {folder}), or "
        "choose another run.name."
    )


@contextmanager
def _taking_turns(folder: Path) -> Iterator[bool]:
    """Let starts on this machine take turns; False where the file system cannot lock a folder.

    The kernel drops this lock when a process dies, so it can never be left behind.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


class RunLock:
    """The lock of one folder."""

    def __init__(self, folder: Path, takeover_seconds: float) -> None:
        self.folder = folder
        self.takeover_seconds = takeover_seconds
        self.path = folder / LOCK
        self.holder = this_process()
        self.lost: Holder | None = None
        """The process that has taken the folder over from this one, if any."""
        self._created_folders: list[Path] = []
        """Those that did not exist before `take`, the innermost first."""
        # `moved` and the thread of `_beat` both write the lock file.
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the lock, also from a dead holder; the error names a living one."""
        check_writable(self.folder)
        self._created_folders = missing_folders(self.folder)

        # The state of the lock when the wait for this holder began, and when that was.
        first: LockState | None = None
        waiting_since = 0.0
        with writing(self.folder, error=ConfigError):
            while not self._create():
                state = read_holder(self.path)
                if state is None:
                    continue  # released at this moment: try again
                holder = state.holder
                alive = None
                if holder is not None:
                    alive = holder.is_alive()

                # A holder elsewhere cannot be looked at, but it touches its file if it is alive.
                is_known = first is not None and first.token == state.token
                has_changed = first is not None and first.changed_ns != state.changed_ns
                if alive or (is_known and has_changed):
                    raise _in_use(self.folder, holder)

                if not is_known:
                    first = state
                    waiting_since = time.monotonic()
                    if alive is None:
                        self._log_waiting(holder)

                waited_seconds = time.monotonic() - waiting_since
                if alive is not False and waited_seconds < self.takeover_seconds:
                    time.sleep(POLL_SECONDS)
                    continue
                log.info(
                    "took over %s: its holder (%s) is dead",
                    self.path,
                    "unknown" if holder is None else holder.describe(),
                )
                if self._take_over(state.token):
                    break
                first = None  # another start was faster: wait for that one
        self._thread = threading.Thread(target=self._beat, name="headway-run-lock", daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """The folder was renamed with the lock in it: take a new lock under the old name."""
        with self._guard, writing(self.folder, error=ConfigError):
            if not self._create():
                state = read_holder(self.path)
                raise _in_use(self.folder, None if state is None else state.holder)

    def check(self) -> None:
        """Refuse to continue in a folder that another process has taken over, e.g. while this one
        was suspended.
        """
        if self.lost is not None:
            raise ConfigError(
                f"{self.folder} was taken over by {self.lost.describe()}, because this process did "
                "not update its lock for too long. "
                "It stops without saving. If it was only slow, raise run.takeover_seconds."
            )

    def release(self) -> None:
        """Release the lock; folders that were made for it alone are removed.

        A lock file that cannot be removed stays: its holder is dead as soon as this process ends,
        and the next start takes it over.
        """
        # The thread first: it would put a missing lock file back.
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._is_ours():
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as problem:
                    log.warning("%s could not be removed: %s", self.path, problem.strerror)
        remove_empty(self._created_folders)

    def _is_ours(self) -> bool:
        """Whether the lock file is that of this process."""
        state = read_holder(self.path)
        return state is not None and state.token == self.holder.token

    def _log_waiting(self, holder: Holder | None) -> None:
        description = "an unknown process"
        if holder is not None:
            description = holder.describe()
        log.info(
            "%s is held by %s, which cannot be checked from this machine; "
            "waiting up to %.0f s to see whether it is alive",
            self.path,
            description,
            self.takeover_seconds,
        )

    def _create(self) -> bool:
        """Put our lock in place; False where there is one.

        Whole from the first moment: a hard link to a finished file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        content = (json.dumps(asdict(self.holder)) + "\n").encode()
        # Linking fails if the name exists, on network file systems too, where O_EXCL may not hold.
        temporary = self.folder / f"{LOCK_PREFIX}{uuid.uuid4().hex}"
        try:
            temporary.write_bytes(content)
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError:
            return self._create_without_links(content)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _create_without_links(self, content: bytes) -> bool:
        """For a file system without hard links: a reader may see the file before its content."""
        try:
            with open(self.path, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def _take_over(self, token: str) -> bool:
        """Replace a dead holder's lock by ours, one start at a time.

        False where another start was faster.
        """
        with _taking_turns(self.folder) as is_alone:
            self._remove_dead(token)
            if not self._create():
                return False
        if not is_alone:
            # Another start that found the same dead holder may have moved our lock for a moment.
            time.sleep(SETTLE_SECONDS)
        return self._is_ours()

    def _remove_dead(self, token: str) -> None:
        """Take a dead holder's lock away, unless another start was faster and has replaced it."""
        state = read_holder(self.path)
        if state is None or state.token != token:
            return

        # Moved aside rather than deleted: between the look above and this line the file may have
        # become another start's lock, which is then put back.
        aside = self.folder / f"{LOCK_PREFIX}{uuid.uuid4().hex}"
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        moved = read_holder(aside)
        moved_token = moved.token if moved is not None else ""
        if moved_token != token:
            with suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Show that this process is alive; notice if another has taken the lock."""
        has_warned = False
        while not self._over.wait(BEAT_SECONDS):
            # A disk that fails for a moment costs one beat, not the lock.
            with self._guard, suppress(OSError):
                state = read_holder(self.path)
                if state is None:
                    if not has_warned:
                        has_warned = True
                        log.warning(
                            "%s is missing: the run folder was removed or renamed during the run; "
                            "training continues",
                            self.path,
                        )
                    if self.folder.is_dir():
                        self._create()
                    continue

                if state.holder is not None and state.token != self.holder.token:
                    self.lost = state.holder
                    return
                os.utime(self.path)

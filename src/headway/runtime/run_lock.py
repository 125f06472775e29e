"""One process at a time in a folder: a lock file that says who holds it and shows that the holder still lives.

    RUN/lock.json   {"token": "...", "host": "node7", "pid": 4711, "since": 1763200000.0, ...}    its time of change moves every 2 s

A holder on this machine is dead when its process is gone (the process id and the start time both count, because ids repeat), and its lock
is taken over at once. A holder on another host or in another container cannot be checked directly: it is alive if its lock file changes
while we wait, and dead if the file does not change for `takeover_seconds` of our monotonic clock. Clocks are never compared.
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
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import ConfigError
from headway.runtime.process import boot_id, process_start
from headway.runtime.storage import check_writable, writing
from headway.runtime.temporary import LOCK_PREFIX

log = logging.getLogger("headway")

LOCK = "lock.json"
BEAT_SECONDS = 2.0
POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0


@dataclass(frozen=True)
class Holder:
    """Who holds a lock."""

    token: str
    host: str
    machine: str
    """The boot of the machine and the space its process ids belong to: within it, a process id means one process."""
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


def this_process() -> Holder:
    """This process as a holder."""
    pid = os.getpid()
    return Holder(
        uuid.uuid4().hex, socket.gethostname(), boot_id(), pid, process_start(pid), time.time()
    )


def read_holder(path: Path) -> tuple[Holder | None, int] | None:
    """Who holds a lock (None: its file is damaged) and when the file last changed; None where there is no lock."""
    try:
        # opened again each time, so that a network file system queries its server
        with open(path, "rb", opener=regular_only) as file:
            content, changed = file.read(1 << 16), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
    try:
        given: Any = json.loads(content)
        started = given["started"]
        holder = Holder(
            str(given["token"]), str(given["host"]), str(given["machine"]), int(given["pid"]),
            None if started is None else str(started), float(given["since"]),
        )  # fmt: skip
        return holder, changed
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, changed


def refuse_live(folder: Path) -> None:
    """Refuse a folder whose holder is a living process of this machine; one elsewhere is for `RunLock.take` to judge, which takes time."""
    found = read_holder(folder / LOCK)
    if found is not None and found[0] is not None and found[0].is_alive():
        raise _in_use(folder, found[0])


def _in_use(folder: Path, holder: Holder | None) -> ConfigError:
    who = "another process" if holder is None else holder.describe()
    return ConfigError(
        f"{folder} is in use by {who}. Stop that one first (headway stop {folder}), or choose another run.name."
    )


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[bool]:
    """Let starts on this machine take turns; False where the file system cannot lock a folder."""
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
        self.folder, self.takeover_seconds = folder, takeover_seconds
        self.path = folder / LOCK
        self.holder = this_process()
        self.lost: Holder | None = None
        """The process that has taken the folder over from this one, if any."""
        self._made: list[Path] = []
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take the lock, also from a dead holder; the error names a living one."""
        check_writable(self.folder)
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        seen: tuple[str, int, float] | None = None
        with writing(self.folder, error=ConfigError):
            while not self._plant():
                found = read_holder(self.path)
                if found is None:
                    continue
                holder, changed = found
                alive = None if holder is None else holder.is_alive()
                token = "" if holder is None else holder.token
                if alive or (seen is not None and seen[0] == token and seen[1] != changed):
                    raise _in_use(self.folder, holder)
                if seen is None or seen[0] != token:
                    seen = (token, changed, time.monotonic())
                    if alive is None:
                        self._say_waiting(holder)
                if alive is False or time.monotonic() - seen[2] >= self.takeover_seconds:
                    log.info(
                        "took over %s: its holder (%s) is dead",
                        self.path,
                        "unknown" if holder is None else holder.describe(),
                    )
                    if self._take_over(token):
                        break
                    seen = None
                else:
                    time.sleep(POLL_SECONDS)
        self._thread = threading.Thread(target=self._beat, name="headway-run-lock", daemon=True)
        self._thread.start()

    def moved(self) -> None:
        """The folder was renamed with the lock in it: take the lock of the new one at the old place."""
        with self._guard, writing(self.folder, error=ConfigError):
            if not self._plant():
                found = read_holder(self.path)
                raise _in_use(self.folder, None if found is None else found[0])

    def check(self) -> None:
        """Refuse to continue in a folder that another process has taken over, e.g. while this one was suspended."""
        if self.lost is not None:
            raise ConfigError(
                f"{self.folder} was taken over by {self.lost.describe()}, because this process did not update its lock for too long. "
                "It stops without saving. If it was only slow, raise run.takeover_seconds."
            )

    def release(self) -> None:
        """Release the lock; folders that were made for it alone are removed. A lock file that cannot be removed stays: its holder is dead
        as soon as this process ends, and the next start takes it over."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            found = read_holder(self.path)
            if found is not None and found[0] is not None and found[0].token == self.holder.token:
                try:
                    self.path.unlink(missing_ok=True)
                except OSError as problem:
                    log.warning("%s could not be removed: %s", self.path, problem.strerror)
        for path in self._made:
            with suppress(OSError):
                path.rmdir()

    def _say_waiting(self, holder: Holder | None) -> None:
        who = "an unknown process" if holder is None else holder.describe()
        log.info(
            "%s is held by %s, which cannot be checked from this machine; waiting up to %.0f s to see whether it is alive",
            self.path,
            who,
            self.takeover_seconds,
        )

    def _plant(self) -> bool:
        """Put our lock in place; False where there is one. Whole from the first moment: a hard link to a finished file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = (json.dumps(asdict(self.holder)) + "\n").encode()
        temporary = self.folder / f"{LOCK_PREFIX}{uuid.uuid4().hex}"
        try:
            temporary.write_bytes(content)
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError:
            return self._plant_without_links(content)
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _plant_without_links(self, content: bytes) -> bool:
        try:
            with open(self.path, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def _take_over(self, token: str) -> bool:
        """Replace a dead holder's lock by ours, one start at a time; False where another start was faster."""
        with _one_at_a_time(self.folder) as is_alone:
            self._depose(token)
            if not self._plant():
                return False
        if not is_alone:
            time.sleep(
                SETTLE_SECONDS
            )  # one that judged the dead holder as we did may have moved our lock for a moment
        found = read_holder(self.path)
        return found is not None and found[0] is not None and found[0].token == self.holder.token

    def _depose(self, token: str) -> None:
        """Take a dead holder's lock away, unless another start was faster and has replaced it."""
        found = read_holder(self.path)
        if found is None or (found[0].token if found[0] is not None else "") != token:
            return
        aside = self.folder / f"{LOCK_PREFIX}{uuid.uuid4().hex}"
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        found = read_holder(aside)
        token_found = "" if found is None or found[0] is None else found[0].token
        if token_found != token:
            with suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        """Show that this process is alive; notice if another has taken the lock."""
        said = False
        while not self._over.wait(BEAT_SECONDS):
            with self._guard, suppress(OSError):
                found = read_holder(self.path)
                if found is None and not said:
                    said = True
                    log.warning(
                        "%s is missing: the run folder was removed or renamed during the run; training continues",
                        self.path,
                    )
                if found is None and self.folder.is_dir():
                    self._plant()
                elif (
                    found is not None
                    and found[0] is not None
                    and found[0].token != self.holder.token
                ):
                    self.lost = found[0]
                    return
                elif found is not None:
                    os.utime(self.path)

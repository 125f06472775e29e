"""Where each rank of a run is: the training thread keeps it in memory, another thread writes it to a small file.

    RUN/logs/heartbeat/rank-00003.json   {"rank": 3, "step": 120, "phase": "step", "collective": "all_reduce", "number": 7731, ...}

The training thread only sets numbers, so a step costs nothing; the other thread keeps writing while a collective or a kernel blocks, so
that an observer sees since when, and in what. A signal makes every thread's stack go to RUN/logs/stacks-rank-*.txt.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from headway.config.regular_file import regular_only
from headway.errors import CommunicationError
from headway.runtime.json_file import load_json
from headway.runtime.storage import writing

FOLDER = Path("logs") / "heartbeat"
WRITE_SECONDS = 0.5
log = logging.getLogger("headway")

STANDARD_ERROR = 2
STACK_SIGNAL = signal.SIGUSR2
KEPT_COLLECTIVES = 64
LOST = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
)
"""What torch says when another rank is gone or late."""


@dataclass(frozen=True)
class Beat:
    """What a rank's file says. Times are those of its host's clock, in seconds since 1970."""

    rank: int
    pid: int
    host: str
    step: int
    phase: str
    """start, step, validate, save or end."""
    progress_at: float
    """When it last made progress: a step, a microbatch of a validation, a save."""
    at: float
    collective: str | None = None
    """What it exchanges with others at this moment."""
    number: int = 0
    """Exchanges it has begun so far."""
    waiting_since: float | None = None

    def describe(self, now: float) -> str:
        """As one line of text."""
        still = max(0.0, now - self.progress_at)
        where = f"rank {self.rank} on {self.host}: {self.phase} after step {self.step}, no progress for {still:.0f} s"
        if self.collective is not None and self.waiting_since is not None:
            where += f", for {max(0.0, now - self.waiting_since):.0f} s in {self.collective} (exchange {self.number})"
        return where


class Heartbeat:
    """The state of this rank. Nothing is written before `write_to`."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.step, self.phase = rank, 0, "start"
        self.progress_at = time.time()
        self.number = 0
        self.recent: deque[tuple[float, int, str]] = deque(maxlen=KEPT_COLLECTIVES)
        self._current: tuple[str, float] | None = None
        self._path: Path | None = None
        self._stacks: IO[str] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, phase: str, step: int) -> None:
        """This rank made progress."""
        self.phase, self.step, self.progress_at = phase, step, time.time()

    @contextmanager
    def exchanging(self, collective: str, size: int, axis: str = "") -> Iterator[None]:
        """Around a wait for other ranks; an error of torch in it becomes one that says who waited for how long in what.

        `axis` is that of the mesh along which they exchange; empty: all ranks.
        """
        before, now = self._current, time.time()
        self._current = (f"{collective} of {size} {axis + ' ' if axis else ''}ranks", now)
        try:
            yield
        except RuntimeError as problem:
            raise self.lost(problem) from problem
        finally:
            self._current = before

    def count(self, collective: str) -> None:
        """An exchange begins."""
        self.number += 1
        self.recent.append((time.time(), self.number, collective))

    def lost(self, problem: Exception) -> CommunicationError:
        """What this rank can say about an exchange that failed."""
        what, since = self._current or ("an exchange", self.progress_at)
        where = f"(exchange {self.number}, {self.phase} after step {self.step})"
        return CommunicationError(
            f"rank {self.rank} waited {time.time() - since:.0f} s in {what} {where}: {first_line(problem)}"
        )

    def snapshot(self) -> Beat:
        """What the file says now."""
        name, since = self._current or (None, None)
        return Beat(
            self.rank,
            os.getpid(),
            socket.gethostname(),
            self.step,
            self.phase,
            self.progress_at,
            time.time(),
            name,
            self.number,
            since,
        )

    def write_to(self, run_dir: Path) -> None:
        """Begin to write, and to answer the signal for stacks; once is enough."""
        if self._path is not None:
            return
        folder = run_dir / FOLDER
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"rank-{self.rank:05}.json"
        if hasattr(faulthandler, "register"):
            self._answer_stacks(stacks_file(run_dir, self.rank))
        self._write()
        self._over.clear()
        self._thread = threading.Thread(target=self._work, name="headway-heartbeat", daemon=True)
        self._thread.start()

    def _answer_stacks(self, path: Path) -> None:
        """On a signal, the stacks go to a file; where that cannot be opened, to standard error, and the run continues."""
        try:
            self._stacks = open(path, "a", encoding="utf-8", opener=regular_only)  # noqa: SIM115
        except OSError as problem:
            log.warning("%s: %s; stacks will go to standard error", path, problem.strerror)
        # without a handler the signal would end the process
        faulthandler.register(
            STACK_SIGNAL,
            self._stacks if self._stacks is not None else STANDARD_ERROR,
            all_threads=True,
            chain=False,
        )

    def _work(self) -> None:
        while not self._over.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> None:
        assert self._path is not None
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(asdict(self.snapshot())), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError:
            return  # on a full disk; a supervisor, which cannot write there either, does not take the silence for a hang

    def close(self, *, well: bool) -> None:
        """Stop writing. After a good end nothing is left; else the last state stays for a post-mortem."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._path is not None:
            if hasattr(faulthandler, "register"):
                faulthandler.unregister(STACK_SIGNAL)
            self._write()
            if well:
                self._path.unlink(missing_ok=True)
            self._path = None
        if self._stacks is not None:
            self._stacks.close()
            _remove_if_empty(Path(self._stacks.name))
            self._stacks = None


def _remove_if_empty(path: Path) -> None:
    """Without a stack in it the file would look like the trace of a crash."""
    try:
        if path.stat().st_size == 0:
            path.unlink()
    except OSError:
        return


def first_line(problem: BaseException) -> str:
    """The first sentence of an error, or its name, without the place in torch's sources."""
    lines = str(problem).strip().splitlines()
    text = re.sub(r"^(\[[^\]]*:\d+\] )+", "", lines[0]) if lines else ""
    return text.split(". ")[0].rstrip(".") or type(problem).__name__


def is_lost(problem: BaseException) -> bool:
    """Whether an error of torch means that another rank is gone or late."""
    text = f"{type(problem).__name__} {problem}".lower()
    return isinstance(problem, RuntimeError) and any(word in text for word in LOST)


def stacks_file(run_dir: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks on a signal."""
    return run_dir / "logs" / f"stacks-rank-{rank:05}.txt"


def read_beats(run_dir: Path) -> list[Beat]:
    """What every rank last wrote, by rank; a file that is just being replaced or is damaged is left out."""
    found: list[Beat] = []
    for path in sorted((run_dir / FOLDER).glob("rank-*.json")):
        try:
            found.append(Beat(**load_json(path)))
        except (OSError, ValueError, TypeError):
            continue
    return found


def clear_beats(run_dir: Path) -> None:
    """Remove the files of an earlier start."""
    for path in (run_dir / FOLDER).glob("rank-*"):
        path.unlink(missing_ok=True)


def is_alive(beat: Beat, silent_seconds: float = 10.0) -> bool:
    """Whether that rank still runs: on this machine its process, elsewhere by when it last wrote."""
    if beat.host != socket.gethostname():
        return time.time() - beat.at < silent_seconds
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(beat.pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def suspects(beats: Sequence[Beat], now: float) -> str:
    """The ranks that delay the others: those with the fewest collectives, or in none. One sentence; empty if no rank stands out."""
    if len(beats) < 2:
        return ""
    idle = [beat for beat in beats if beat.collective is None]
    fewest = min(beat.number for beat in beats)
    behind = (
        idle
        if idle and len(idle) < len(beats)
        else [beat for beat in beats if beat.number == fewest]
    )
    if len(behind) == len(beats):
        return ""
    return "The others wait for " + "; ".join(beat.describe(now) for beat in behind) + "."

"""Where each rank of a run is: the training thread keeps it in memory, another thread writes it to
a small file.

    RUN/logs/heartbeat/rank-00003.json
        {"rank": 3, "step": 120, "phase": "step", "collective": "all_reduce", "number": 7731, ...}

The training thread only sets numbers, so a step costs nothing; the other thread keeps writing while
a collective or a kernel blocks, so that an observer sees since when, and in what. A signal makes
every thread's stack go to RUN/logs/stacks-rank-*.txt.
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

log = logging.getLogger("headway")

FOLDER = Path("logs") / "heartbeat"
WRITE_SECONDS = 0.5
"""How often the file is written."""
STANDARD_ERROR = 2
STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write the stacks of its threads."""
KEPT_COLLECTIVES = 64
SILENT_SECONDS = 10.0
"""A rank on another machine that has not written for so long counts as gone."""
LOST_PHRASES = (
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
    """When the file was written."""
    collective: str | None = None
    """What it exchanges with others at this moment."""
    number: int = 0
    """Exchanges it has begun so far."""
    waiting_since: float | None = None
    """When the exchange in `collective` began."""

    def describe(self, now: float) -> str:
        """As one line of text."""
        # Never negative: clocks of two hosts may differ by a little.
        idle_seconds = max(0.0, now - self.progress_at)
        text = (
            f"rank {self.rank} on {self.host}: {self.phase} after step {self.step}, "
            f"no progress for {idle_seconds:.0f} s"
        )
        if self.collective is not None and self.waiting_since is not None:
            waited_seconds = max(0.0, now - self.waiting_since)
            text += f", for {waited_seconds:.0f} s in {self.collective} (exchange {self.number})"
        return text


class Heartbeat:
    """The state of this rank. Nothing is written before `write_to`."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.step = 0
        self.phase = "start"
        self.progress_at = time.time()
        self.number = 0
        """Exchanges begun so far."""
        self.recent: deque[tuple[float, int, str]] = deque(maxlen=KEPT_COLLECTIVES)
        """The newest exchanges: time, number, name."""
        self._current: tuple[str, float] | None = None
        """The exchange this rank waits in, and since when."""
        self._path: Path | None = None
        self._stacks: IO[str] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, phase: str, step: int) -> None:
        """This rank made progress."""
        self.phase = phase
        self.step = step
        self.progress_at = time.time()

    @contextmanager
    def exchanging(self, collective: str, size: int, axis: str = "") -> Iterator[None]:
        """Around a wait for other ranks.

        An error of torch in it becomes one that says who waited for how long in what.

        `axis` is that of the mesh along which they exchange; empty: all ranks.
        """
        before = self._current
        kind = f"{axis} ranks" if axis else "ranks"
        self._current = (f"{collective} of {size} {kind}", time.time())
        try:
            yield
        except RuntimeError as problem:
            raise self.lost(problem) from problem
        finally:
            # Exchanges may be nested: the outer one continues.
            self._current = before

    def count(self, collective: str) -> None:
        """An exchange begins."""
        self.number += 1
        self.recent.append((time.time(), self.number, collective))

    def lost(self, problem: Exception) -> CommunicationError:
        """What this rank can say about an exchange that failed."""
        collective, since = self._current or ("an exchange", self.progress_at)
        where = f"(exchange {self.number}, {self.phase} after step {self.step})"
        return CommunicationError(
            f"rank {self.rank} waited {time.time() - since:.0f} s in {collective} {where}: "
            f"{first_line(problem)}"
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
        self._thread = threading.Thread(
            target=self._write_regularly, name="headway-heartbeat", daemon=True
        )
        self._thread.start()

    def _answer_stacks(self, path: Path) -> None:
        """On a signal, the stacks go to a file.

        Where that cannot be opened, to standard error, and the run continues.
        """
        try:
            self._stacks = open(path, "a", encoding="utf-8", opener=regular_only)  # noqa: SIM115
        except OSError as problem:
            log.warning("%s: %s; stacks will go to standard error", path, problem.strerror)
        # Without a handler the signal would end the process.
        target = self._stacks if self._stacks is not None else STANDARD_ERROR
        faulthandler.register(STACK_SIGNAL, target, all_threads=True, chain=False)

    def _write_regularly(self) -> None:
        while not self._over.wait(WRITE_SECONDS):
            self._write()

    def _write(self) -> None:
        assert self._path is not None
        # By rename, so that a reader never sees half of it. No fsync: only the newest state counts.
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(asdict(self.snapshot())), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError:
            # A full disk. A supervisor, which cannot write there either, does not take the silence
            # for a hang.
            return

    def close(self, *, well: bool) -> None:
        """Stop writing.

        After a good end nothing is left; else the last state stays for a post-mortem.
        """
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
    text = ""
    if lines:
        # gloo begins with its source: "[/pytorch/gloo/transport/tcp/pair.cc:534] Connection ...".
        text = re.sub(r"^(\[[^\]]*:\d+\] )+", "", lines[0])
    return text.split(". ")[0].rstrip(".") or type(problem).__name__


def is_lost(problem: BaseException) -> bool:
    """Whether an error of torch means that another rank is gone or late."""
    text = f"{type(problem).__name__} {problem}".lower()
    return isinstance(problem, RuntimeError) and any(phrase in text for phrase in LOST_PHRASES)


def stacks_file(run_dir: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks on a signal."""
    return run_dir / "logs" / f"stacks-rank-{rank:05}.txt"


def read_beats(run_dir: Path) -> list[Beat]:
    """What every rank last wrote, by rank.

    A file that is just being replaced or is damaged is left out.
    """
    beats: list[Beat] = []
    for path in sorted((run_dir / FOLDER).glob("rank-*.json")):
        try:
            beats.append(Beat(**load_json(path)))
        except (OSError, ValueError, TypeError):
            continue
    return beats


def clear_beats(run_dir: Path) -> None:
    """Remove the files of an earlier start."""
    for path in (run_dir / FOLDER).glob("rank-*"):
        path.unlink(missing_ok=True)


def is_alive(beat: Beat, silent_seconds: float = SILENT_SECONDS) -> bool:
    """Whether that rank runs: here by its process, on other hosts by when it last wrote."""
    if beat.host != socket.gethostname():
        return time.time() - beat.at < silent_seconds
    # Signal 0 only asks whether the process exists. A zombie does, until its parent has looked.
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
    """The ranks that delay the others: those with the fewest collectives, or in none.

    One sentence; empty if no rank stands out.
    """
    if len(beats) < 2:
        return ""

    # A rank in no exchange, while others wait in one, is the one they wait for. If all wait, it is
    # a rank that is an exchange behind.
    behind = [beat for beat in beats if beat.collective is None]
    if not behind or len(behind) == len(beats):
        fewest = min(beat.number for beat in beats)
        behind = [beat for beat in beats if beat.number == fewest]
    if len(behind) == len(beats):
        return ""
    return "The others wait for " + "; ".join(beat.describe(now) for beat in behind) + "."

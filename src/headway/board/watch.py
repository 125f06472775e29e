"""All runs of a board: finds them, follows their files while somebody looks, builds their indexes
in other processes.

Folders and mirrors of remote folders come in. Every change of a run gives it a new number, so that
a page asks only for what changed. One thread looks; requests only read what it has found, and never
wait for a slow disk or network behind it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.board.curves import RunCurves
from headway.board.index import build_index
from headway.board.preview import last_record
from headway.board.rollouts import RolloutFollower
from headway.board.runs import RunStatus, StatusReader, file_mark, find_runs, run_id
from headway.runtime.process import worker_pool
from headway.train.run_folder import METRICS

LOOK_SECONDS = 0.7
"""Between two looks at the files of a source."""
FIND_SECONDS = 5.0
"""Between two searches for new run folders."""
IDLE_SECONDS = 30.0
"""Nobody has asked for this long: files are left alone until somebody does."""
FULL_STATUS_SECONDS = 3.0
"""The status of a run whose metrics do not change is read this often: heartbeats, events."""
BUILDERS = 2
"""Processes that build indexes."""
LISTED = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "tgs",
    "mfu_full",
    "mfu_causal",
    "memory_bytes",
    "eta_seconds",
    "num_consumed_tokens",
    "step_seconds",
    "stage",
)
"""Metrics of a run's newest record that the list shows."""
VALID_LOSS = re.compile(r"valid/([^/]+/)?loss")
"""A single validation set needs no name."""
log = logging.getLogger("headway")


def _lower_priority() -> None:
    """In a process that builds indexes: answers to people come first."""
    os.nice(10)


class Source(Protocol):
    """Where run folders are: on this machine, or copied from another."""

    label: str
    is_here: bool
    problem: str

    def folders(self) -> list[tuple[str, Path]]:
        """Names and local folders of the runs."""
        ...

    def refresh(self) -> None:
        """Bring copies up to date; does nothing for folders of this machine."""
        ...

    def clock(self) -> float:
        """The time on the machine where the runs are."""
        ...

    def want(self, folder: Path) -> None:
        """Somebody looks at this run: fetch what is only fetched on demand."""
        ...

    def close(self) -> None: ...


class LocalSource:
    """A folder of this machine. Its runs are read where they are."""

    is_here = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.label = str(root)
        self.problem = ""

    def folders(self) -> list[tuple[str, Path]]:
        """Named by their path below the root; the root itself by its own name."""
        paths = find_runs(self.root)
        self.problem = "" if paths else "no runs here yet"
        names_and_paths: list[tuple[str, Path]] = []
        for path in paths:
            name = str(path.relative_to(self.root))
            if path == self.root:
                name = path.absolute().name
            names_and_paths.append((name, path))
        return names_and_paths

    def refresh(self) -> None:
        """Nothing to copy."""

    def clock(self) -> float:
        """This machine's."""
        return time.time()

    def want(self, folder: Path) -> None:
        """Everything is here."""

    def close(self) -> None:
        """Nothing is open."""


def newest_valid_loss(newest: Mapping[str, Any]) -> float | None:
    """The newest validation loss of a run, of its first validation set.

    None where it has not validated yet.
    """
    for name, value in newest.items():
        if VALID_LOSS.fullmatch(name) and isinstance(value, float):
            return value
    return None


@dataclass
class WatchedRun:
    """One run of a board: its files, its newest status, and the number of its last change."""

    id: str
    name: str
    folder: Path
    source: Source
    curves: RunCurves
    reader: StatusReader
    rollouts: RolloutFollower
    status: RunStatus = field(default_factory=RunStatus)
    newest: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    building: Future[None] | None = None
    is_wanted: bool = False
    """Somebody has looked at its curves."""
    looked_at: float = 0.0
    mark: tuple[int, int] = (0, 0)
    """`file_mark` of its metrics when they were last looked at."""

    def row(self) -> dict[str, Any]:
        """What the list shows, as plain values."""
        values = {name: self.newest.get(name) for name in LISTED}
        values["valid_loss"] = newest_valid_loss(self.newest)
        return {
            "id": self.id,
            "name": self.name,
            "source": self.source.label,
            "version": self.version,
            "partial": self.is_indexing,
            **asdict(self.status),
            **values,
        }

    @property
    def is_indexing(self) -> bool:
        """Whether its curves will become finer."""
        return self.building is not None


class Board:
    """The runs of some sources.

    `version` counts changes of any run. A run has the number of its last change, so that a page
    that knows version N asks for the runs above N. `lock` guards the runs and their rows; files are
    read without it.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.runs: dict[str, WatchedRun] = {}
        self.version = 1
        self.lock = threading.RLock()
        self._asked = time.monotonic()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._stack = ExitStack()
        self._pool: ProcessPoolExecutor | None = None
        self._threads: list[threading.Thread] = []
        self._found_at: dict[int, float] = {}

    def start(self) -> Board:
        """Find the runs once, then keep looking from threads: one for each source, so that a slow
        host delays only itself.
        """
        for source in self.sources:
            # A first look at local folders is quick, and the page opens with their runs. Remote
            # ones appear when they have answered.
            if source.is_here:
                self.look(source)
            thread = threading.Thread(
                target=self._watch, args=(source,), name=f"board {source.label}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._wake.set()
        for source in self.sources:
            source.close()

        for thread in self._threads:
            thread.join(timeout=5.0)

        with self.lock:
            pool = self._pool
            self._pool = None

        # An index may take minutes; the pool would wait for it. What is half built is dropped.
        if pool is not None:
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()

        self._stack.close()

    def __enter__(self) -> Board:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def touch(self) -> None:
        """Somebody looks: files are followed again."""
        self._asked = time.monotonic()
        self._wake.set()

    def _watch(self, source: Source) -> None:
        """The thread of one source: looks again and again while somebody asks, sleeps while nobody
        does.
        """
        while not self._over.is_set():
            if time.monotonic() - self._asked > IDLE_SECONDS:
                self._wake.clear()
                self._wake.wait()
                continue

            # A look that took long is followed by a short pause all the same.
            begun = time.monotonic()
            try:
                source.refresh()
                self.look(source)
            except Exception as problem:  # a board goes blind otherwise; the page shows why
                source.problem = f"{type(problem).__name__}: {problem}"
                log.debug("%s: %s", source.label, problem, exc_info=True)

            self._over.wait(max(0.1, LOOK_SECONDS - (time.monotonic() - begun)))

    def look(self, source: Source) -> None:
        """Find new runs now and then, and read what is new in each."""
        now = time.monotonic()
        # A search reads every folder below the root; a mirror has its list already.
        if now - self._found_at.get(id(source), -1e9) >= FIND_SECONDS or not source.is_here:
            self._find(source)
            self._found_at[id(source)] = now
        with self.lock:
            runs = [run for run in self.runs.values() if run.source is source]
        for run in runs:
            if self._over.is_set():
                return
            self._look_at(run, now)

    def _find(self, source: Source) -> None:
        """Take up new run folders, and forget those that are gone."""
        # Outside of the lock: a search may take seconds.
        folders = {run_id(source.label, name): (name, folder) for name, folder in source.folders()}
        with self.lock:
            known_ids = {run.id for run in self.runs.values() if run.source is source}
            for lost_id in known_ids - folders.keys():
                del self.runs[lost_id]
                self.version += 1

            for new_id in folders.keys() - known_ids:
                name, folder = folders[new_id]
                curves = RunCurves(folder / METRICS)
                self.runs[new_id] = WatchedRun(
                    new_id,
                    name,
                    folder,
                    source,
                    curves,
                    StatusReader(folder, is_here=source.is_here),
                    RolloutFollower(folder),
                )
                self._mark_changed(self.runs[new_id])

    def _look_at(self, run: WatchedRun, now: float) -> None:
        """Read what is new in one run, and give it a new version if the page shows it
        differently.
        """
        mark = file_mark(run.folder / METRICS)
        is_new = mark != run.mark
        if not is_new and run.building is None and now - run.looked_at < FULL_STATUS_SECONDS:
            return

        run.looked_at = now
        run.mark = mark
        changed = False

        # First take over a finished index, then read what came behind it.
        if run.building is not None and run.building.done():
            problem = run.building.exception()
            if problem is not None:
                # The cache cannot be written, say: read the metrics here, into memory.
                log.debug("%s: its index cannot be built: %s", run.folder, problem)
                run.curves.reads_here = True

            # In this order: other threads read "not indexing" as "the curves are whole".
            run.curves.built()
            run.building = None
            changed = True

        # Metrics of runs that nobody looks at are not read, however many there are.
        if run.is_wanted and run.building is None:
            if run.curves.wants_build:
                self._build(run)
                changed = True
            else:
                changed |= run.curves.update()

        # The list needs the newest numbers of every run; the last line has them without an index.
        if run.is_wanted and not run.curves.is_partial:
            newest = run.curves.newest()
        else:
            newest = last_record(run.folder / METRICS).newest()

        status = run.reader.read(newest, run.source.clock())
        # A heartbeat without a new record changes the status at most.
        if changed or is_new or status != run.status or newest.keys() != run.newest.keys():
            with self.lock:
                run.newest = newest
                run.status = status
                self._mark_changed(run)

    def _mark_changed(self, run: WatchedRun) -> None:
        with self.lock:
            self.version += 1
            run.version = self.version

    def _build(self, run: WatchedRun) -> None:
        """Index the metrics of a run in another process, unless that is being done."""
        with self.lock:
            if self._over.is_set() or run.building is not None:
                return
            if self._pool is None:
                self._pool = self._stack.enter_context(
                    worker_pool(min(BUILDERS, os.cpu_count() or 1), _lower_priority)
                )
            run.building = self._pool.submit(build_index, run.curves.path, run.curves.index.folder)

    def want(self, ids: Iterable[str]) -> list[WatchedRun]:
        """The runs with these ids; their curves are kept up to date from now on."""
        runs: list[WatchedRun] = []
        for wanted_id in ids:
            run = self.runs.get(wanted_id)
            if run is None:
                continue

            runs.append(run)
            if run.is_wanted:
                continue
            run.is_wanted = True
            run.source.want(run.folder)
            if run.curves.wants_build:
                self._build(run)
                continue

            run.curves.update()
            # The last record, which the list had so far, need not have every metric.
            with self.lock:
                run.newest = run.curves.newest()
                self._mark_changed(run)

        return runs

    def rows(self, since: int = 0) -> dict[str, Any]:
        """The runs that changed after version `since`, the ids of all, and what is wrong with
        sources.
        """
        with self.lock:
            changed = [run.row() for run in self.runs.values() if run.version > since]
            return {
                "version": self.version,
                "now": time.time(),
                "ids": list(self.runs) if self.version > since else None,
                "runs": changed,
                "sources": [
                    {"label": source.label, "problem": source.problem} for source in self.sources
                ],
            }

    def wait_until(self, is_true: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds; for verbs that print once and for tests."""
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

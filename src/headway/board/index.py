"""The metrics of one run as columns, kept small: sealed segments in the cache folder, the newest rows in memory, loaded when asked for.

    CACHE/<run>/index.json           sealed: how far metrics.jsonl was read, the rows, the columns of each segment
    CACHE/<run>/<segment>-<n>        sealed: one column of one segment, float64 values and (where not every row has one) uint32 rows

A cache that is damaged, of another file or of another version is dropped and built again; nothing of it is needed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
import uuid
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.board.follow import START, Place, is_same_file, read_new
from headway.board.records import ColumnBuffer, RecordBlock
from headway.runtime.paths import cache_home
from headway.runtime.storage import read_sealed, write_sealed

VERSION = 1
SEGMENT_ROWS = 131_072
SEAL_ROWS = 16_384
"""From this many rows in memory on they are sealed."""
COLUMN_CACHE_BYTES = 192 << 20
log = logging.getLogger("headway")

Column = tuple[np.ndarray, np.ndarray]
"""Rows and values."""


@dataclass
class IndexSegment:
    """Some rows whose columns are in the cache folder."""

    name: str
    first_row: int
    rows: int
    columns: dict[str, list[int]]
    """Metric -> [number of its file, values, 1 if every row has one]."""


@dataclass
class IndexState:
    """What index.json holds."""

    path: str
    place: Place = START
    rows: int = 0
    damaged: int = 0
    segments: list[IndexSegment] = field(default_factory=list)
    latest: dict[str, float | str | None] = field(default_factory=dict)


def cache_folder(path: Path) -> Path:
    """Where the index of a metrics.jsonl is cached."""
    return (
        cache_home()
        / "headway"
        / "board"
        / hashlib.sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()[:32]
    )


def load_state(path: Path, folder: Path) -> IndexState:
    """The cached state, or an empty one where there is none that fits the file."""
    empty = IndexState(str(path))
    try:
        content = read_sealed(folder / "index.json")
        if content is None:
            return empty
        given: Any = json.loads(content)
        if given["version"] != VERSION or given["path"] != str(path):
            return empty
        state = IndexState(
            given["path"], Place(**given["place"]), given["rows"], given["damaged"],
            [IndexSegment(**one) for one in given["segments"]], given["latest"],
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as problem:
        log.debug("%s: the cached index is not used: %s", folder, problem)
        return empty
    return state if is_same_file(path, state.place) else empty


def save_state(folder: Path, state: IndexState) -> None:
    """Write index.json and remove segments that it no longer names."""
    write_sealed(
        folder / "index.json",
        json.dumps({"version": VERSION, **asdict(state)}).encode(),
        durable=False,
    )
    named = {one.name for one in state.segments}
    for found in folder.iterdir():
        if (
            found.name != "index.json"
            and not found.name.startswith(".")
            and found.name.rpartition("-")[0] not in named
        ):
            found.unlink(missing_ok=True)


def seal_segment(folder: Path, block: RecordBlock) -> IndexSegment:
    """Write the rows of a block as a segment."""
    name = uuid.uuid4().hex[:16]
    rows = block.rows - block.first_row
    columns: dict[str, list[int]] = {}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number, (metric, column) in enumerate(block.columns.items()):
        is_dense = len(column.rows) == rows
        content = column.values.tobytes() + (b"" if is_dense else column.rows.tobytes())
        write_sealed(folder / f"{name}-{number}", content, durable=False)
        columns[metric] = [number, len(column.values), int(is_dense)]
    return IndexSegment(name, block.first_row, rows, columns)


def build_index(path: Path, folder: Path) -> None:
    """Read what a metrics.jsonl has beyond its cached index into new segments, one in memory at a time. Runs in a process of its own."""
    state = load_state(path, folder)
    block = RecordBlock(state.rows)
    place = state.place

    def seal() -> None:
        nonlocal block
        state.latest |= block.newest()
        state.segments.append(seal_segment(folder, block))
        state.place, state.rows, state.damaged = place, block.rows, state.damaged + block.damaged
        save_state(folder, state)
        block = RecordBlock(state.rows)

    for lines, place in read_new(path, state.place):  # noqa: B007
        block.add(lines)
        if block.rows - block.first_row >= SEGMENT_ROWS:
            seal()
    if block.rows > block.first_row:
        seal()


class _ColumnCache:
    """Sealed columns in memory, the least used dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._known: OrderedDict[Path, Column] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, first_row: int, rows: int, count: int, is_dense: bool) -> Column:
        with self._lock:
            if path in self._known:
                self._known.move_to_end(path)
                return self._known[path]
        content = read_sealed(path)
        if content is None or len(content) != 8 * count + (0 if is_dense else 4 * count):
            raise ValueError(f"{path} is missing or has another size")
        values = np.frombuffer(content, dtype=np.float64, count=count)
        found = np.frombuffer(content, dtype=np.uint32, offset=8 * count) if not is_dense else None
        column = (
            np.arange(first_row, first_row + rows, dtype=np.uint32) if found is None else found,
            values,
        )
        with self._lock:
            if path not in self._known:
                self._known[path] = column
                self.size += 12 * count
            while self.size > self.limit and len(self._known) > 1:
                _, old = self._known.popitem(last=False)
                self.size -= 12 * len(old[1])
        return column


COLUMNS = _ColumnCache(COLUMN_CACHE_BYTES)


class MetricIndex:
    """The metrics of one run. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, cache_folder(path)
        self.state = load_state(path, self.folder)
        self.tail = RecordBlock(self.state.rows)
        self.place = self.state.place
        self.version = 0
        self.lock = threading.RLock()

    @property
    def rows(self) -> int:
        """Records so far."""
        return self.tail.rows

    def reload(self) -> None:
        """Take what another process has built."""
        with self.lock:
            self.state = load_state(self.path, self.folder)
            self._restart()

    def _restart(self) -> None:
        self.tail, self.place = RecordBlock(self.state.rows), self.state.place
        self.version += 1

    def update(self, limit: int | None = None) -> bool:
        """Read what was appended; True if something changed."""
        with self.lock:
            if self.place.offset and not is_same_file(self.path, self.place):
                self.state = IndexState(str(self.path))
                self._restart()
            before = self.tail.rows, self.place.offset
            for lines, place in read_new(self.path, self.place, limit):
                self.tail.add(lines)
                self.place = place
            if self.tail.rows - self.tail.first_row >= SEAL_ROWS:
                self._seal()
            changed = (self.tail.rows, self.place.offset) != before
            self.version += changed
            return changed

    def _seal(self) -> None:
        try:
            segment = seal_segment(self.folder, self.tail)
            latest = self.state.latest | self.tail.newest()
            damaged = self.state.damaged + self.tail.damaged
            state = IndexState(
                str(self.path),
                self.place,
                self.tail.rows,
                damaged,
                [*self.state.segments, segment],
                latest,
            )
            save_state(self.folder, state)
        except OSError as problem:  # a full disk: they stay in memory
            log.debug("%s: the index is not cached: %s", self.folder, problem)
            return
        self.state = state
        self.tail = RecordBlock(state.rows)

    def names(self) -> dict[str, int]:
        """Every metric and how many values it has."""
        with self.lock:
            found: dict[str, int] = {}
            for segment in self.state.segments:
                for name, (_, count, _) in segment.columns.items():
                    found[name] = found.get(name, 0) + count
            for name, column in self.tail.columns.items():
                found[name] = found.get(name, 0) + len(column.values)
            return found

    def newest(self) -> dict[str, float | str | None]:
        """The newest value of every metric and text."""
        with self.lock:
            return self.state.latest | self.tail.newest()

    def column(self, name: str) -> Column:
        """Rows and values of one metric; empty where no record has it."""
        with self.lock:
            parts: list[Column] = []
            try:
                for segment in self.state.segments:
                    if name in segment.columns:
                        number, count, is_dense = segment.columns[name]
                        parts.append(
                            COLUMNS.get(
                                self.folder / f"{segment.name}-{number}",
                                segment.first_row,
                                segment.rows,
                                count,
                                bool(is_dense),
                            )
                        )
            except (OSError, ValueError) as problem:
                log.debug("%s: the cached index is built again: %s", self.folder, problem)
                shutil.rmtree(self.folder, ignore_errors=True)
                self.state = IndexState(str(self.path))
                self._restart()
                self.update()
                return self.column(name)
            if name in self.tail.columns:
                parts.append(self.tail.columns[name].arrays())
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return ColumnBuffer().arrays()
        return np.concatenate([rows for rows, _ in parts]), np.concatenate(
            [values for _, values in parts]
        )

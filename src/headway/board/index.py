"""The metrics of one run as columns, kept small: sealed segments in the cache folder, the newest
rows in memory, loaded when asked for.

    CACHE/<run>/index.json       sealed: how far metrics.jsonl was read, the rows, the columns of
                                 each segment
    CACHE/<run>/<segment>-<n>    sealed: one column of one segment, float64 values and (where not
                                 every row has one) uint32 rows

    metrics.jsonl   |  segment 0  |  segment 1  | ... |  tail, in memory  | half a line
                                                      ^ state.place       ^ place

A cache that is damaged, of another file or of another version is dropped and built again; nothing
of it is needed.
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
"""Of the cache's format; another one is dropped."""
SEGMENT_ROWS = 131_072
"""Of a segment that `build_index` writes."""
SEAL_ROWS = 16_384
"""From this many rows in memory on they are sealed."""
COLUMN_CACHE_BYTES = 192 << 20
"""Of all runs together."""
VALUE_BYTES = 8
ROW_BYTES = 4
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
    """How far the segments reach in metrics.jsonl."""
    rows: int = 0
    damaged: int = 0
    """Lines that are no records."""
    segments: list[IndexSegment] = field(default_factory=list)
    latest: dict[str, float | str | None] = field(default_factory=dict)
    """The newest value of every metric and text in the segments."""


def cache_folder(path: Path) -> Path:
    """Where the index of a metrics.jsonl is cached."""
    digest = hashlib.sha256(str(path.absolute()).encode(errors="surrogateescape")).hexdigest()
    return cache_home() / "headway" / "board" / digest[:32]


def load_state(path: Path, folder: Path) -> IndexState:
    """The cached state, or an empty one where there is none that fits the file."""
    empty = IndexState(str(path))
    try:
        content = read_sealed(folder / "index.json")
        if content is None:
            return empty

        cached: Any = json.loads(content)
        if cached["version"] != VERSION or cached["path"] != str(path):
            return empty

        state = IndexState(
            path=cached["path"],
            place=Place(**cached["place"]),
            rows=cached["rows"],
            damaged=cached["damaged"],
            segments=[IndexSegment(**segment) for segment in cached["segments"]],
            latest=cached["latest"],
        )
    except (OSError, ValueError, KeyError, TypeError) as problem:
        log.debug("%s: the cached index is not used: %s", folder, problem)
        return empty

    # The file may have been replaced or cut off since.
    return state if is_same_file(path, state.place) else empty


def save_state(folder: Path, state: IndexState) -> None:
    """Write index.json and remove segments that it no longer names."""
    write_sealed(
        folder / "index.json",
        json.dumps({"version": VERSION, **asdict(state)}).encode(),
        durable=False,
    )

    # After the index is written: a crash before leaves files that the next save removes.
    segment_names = {segment.name for segment in state.segments}
    for file in folder.iterdir():
        if (
            file.name != "index.json"
            and not file.name.startswith(".")
            and file.name.rpartition("-")[0] not in segment_names
        ):
            file.unlink(missing_ok=True)


def seal_segment(folder: Path, block: RecordBlock) -> IndexSegment:
    """Write the rows of a block as a segment."""
    name = uuid.uuid4().hex[:16]
    rows = block.rows - block.first_row
    columns: dict[str, list[int]] = {}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number, (metric, column) in enumerate(block.columns.items()):
        # Nearly every metric stands in every record; its rows need not be written.
        is_dense = len(column.rows) == rows
        content = column.values.tobytes()
        if not is_dense:
            content += column.rows.tobytes()
        write_sealed(folder / f"{name}-{number}", content, durable=False)
        columns[metric] = [number, len(column.values), int(is_dense)]
    return IndexSegment(name, block.first_row, rows, columns)


def build_index(path: Path, folder: Path) -> None:
    """Read what a metrics.jsonl has beyond its cached index into new segments, one in memory at a
    time. Runs in a process of its own.
    """
    state = load_state(path, folder)
    block = RecordBlock(state.rows)
    end = state.place

    def seal() -> None:
        nonlocal block
        state.latest |= block.newest()
        state.segments.append(seal_segment(folder, block))
        state.place = end
        state.rows = block.rows
        state.damaged += block.damaged
        # After each segment: a process that is killed loses one.
        save_state(folder, state)
        block = RecordBlock(state.rows)

    for lines, end in read_new(path, state.place):  # noqa: B007
        block.add(lines)
        if block.rows - block.first_row >= SEGMENT_ROWS:
            seal()

    if block.rows > block.first_row:
        seal()


class _ColumnCache:
    """Sealed columns in memory, the least used dropped first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._columns: OrderedDict[Path, Column] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, first_row: int, rows: int, count: int, is_dense: bool) -> Column:
        """The column in a file; ValueError where the file is not what the index says.

        Files never change: a segment's name is random, and an index that is built again has other
        segments.
        """
        with self._lock:
            if path in self._columns:
                self._columns.move_to_end(path)
                return self._columns[path]

        content = read_sealed(path)
        expected_bytes = VALUE_BYTES * count
        if not is_dense:
            expected_bytes += ROW_BYTES * count
        if content is None or len(content) != expected_bytes:
            raise ValueError(f"{path} is missing or has another size")

        values = np.frombuffer(content, dtype=np.float64, count=count)
        if is_dense:
            row_numbers = np.arange(first_row, first_row + rows, dtype=np.uint32)
        else:
            row_numbers = np.frombuffer(content, dtype=np.uint32, offset=VALUE_BYTES * count)

        column = (row_numbers, values)
        with self._lock:
            if path not in self._columns:
                self._columns[path] = column
                self.size += (VALUE_BYTES + ROW_BYTES) * count
            while self.size > self.limit and len(self._columns) > 1:
                _, (_, dropped_values) = self._columns.popitem(last=False)
                self.size -= (VALUE_BYTES + ROW_BYTES) * len(dropped_values)

        return column


COLUMNS = _ColumnCache(COLUMN_CACHE_BYTES)


class MetricIndex:
    """The metrics of one run. Safe to use from several threads.

    `state` is what the cache has, `tail` the rows behind it, `place` how far the file was read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = cache_folder(path)
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
        """Drop the rows in memory; the next update reads them again, from the end of `state` on."""
        self.tail = RecordBlock(self.state.rows)
        self.place = self.state.place
        self.version += 1

    def update(self, limit: int | None = None) -> bool:
        """Read what was appended; True if something changed."""
        with self.lock:
            # Replaced, or cut off: everything is read again.
            if self.place.offset and not is_same_file(self.path, self.place):
                self.state = IndexState(str(self.path))
                self._restart()

            before = (self.tail.rows, self.place.offset)
            for lines, end in read_new(self.path, self.place, limit):
                self.tail.add(lines)
                self.place = end

            # Memory stays bounded however long a run is watched.
            if self.tail.rows - self.tail.first_row >= SEAL_ROWS:
                self._seal()

            changed = (self.tail.rows, self.place.offset) != before
            self.version += changed
            return changed

    def _seal(self) -> None:
        """Move the tail to the cache, as a new segment."""
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
        except OSError as problem:
            # A full disk: the rows stay in memory, and the next update tries again.
            log.debug("%s: the index is not cached: %s", self.folder, problem)
            return

        self.state = state
        self.tail = RecordBlock(state.rows)

    def names(self) -> dict[str, int]:
        """Every metric and how many values it has."""
        with self.lock:
            counts: dict[str, int] = {}
            for segment in self.state.segments:
                for name, (_, count, _) in segment.columns.items():
                    counts[name] = counts.get(name, 0) + count
            for name, column in self.tail.columns.items():
                counts[name] = counts.get(name, 0) + len(column.values)
            return counts

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
                    if name not in segment.columns:
                        continue
                    number, count, is_dense = segment.columns[name]
                    file = self.folder / f"{segment.name}-{number}"
                    parts.append(
                        COLUMNS.get(file, segment.first_row, segment.rows, count, bool(is_dense))
                    )
            except (OSError, ValueError) as problem:
                # Built again from metrics.jsonl, which has everything.
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
        all_rows = np.concatenate([rows for rows, _ in parts])
        all_values = np.concatenate([values for _, values in parts])
        return all_rows, all_values

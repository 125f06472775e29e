"""The curves of one run: a metric over steps, tokens or training time, down-sampled for a view.

Training time is the sum of `step_seconds` times the steps between two records: records may be
written every few steps, and pauses between two starts of a run do not count.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from headway.board.downsample import Curve, downsample
from headway.board.follow import pending_bytes
from headway.board.index import Column, MetricIndex
from headway.board.preview import sample_records
from headway.board.records import ColumnBuffer, RecordBlock

XAxis = Literal["step", "tokens", "time"]
X_AXES: tuple[str, ...] = get_args(XAxis)
TOKENS = "num_consumed_tokens"
INLINE_BYTES = 2 << 20
"""More than this is read by a process of its own."""
KEPT_VIEWS = 64
"""Down-sampled curves of a run in memory: several people may look at the same ones."""


@dataclass(frozen=True)
class Window:
    """What part of a curve is looked at, and with how many points."""

    x: XAxis = "step"
    points: int = 1000
    start: float | None = None
    end: float | None = None


class RunCurves:
    """Reads the metrics of one run.

    `wants_build` says that the file should be indexed by another process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads_here = False
        """Read everything in this process, whatever it takes: no other can."""
        self._index: MetricIndex | None = None
        self._preview: RecordBlock | None = None
        self._views: OrderedDict[tuple[int, str, Window], Curve] = OrderedDict()
        self._times: tuple[int, Column] | None = None
        """The version of the index, and the training time at each of its rows."""
        self._lock = threading.Lock()

    @property
    def index(self) -> MetricIndex:
        """Opened at the first use."""
        with self._lock:
            if self._index is None:
                self._index = MetricIndex(self.path)
            return self._index

    @property
    def wants_build(self) -> bool:
        """Whether so much is new that reading it here would make others wait."""
        # Bytes, not rows: how many rows they are is known only after they are read.
        return not self.reads_here and pending_bytes(self.path, self.index.place) > INLINE_BYTES

    @property
    def is_partial(self) -> bool:
        """Whether curves are made of a few records only, until the index is built."""
        return self.index.rows == 0 and self.wants_build

    @property
    def version(self) -> int:
        """Changes whenever curves change."""
        return -1 if self._index is None else self._index.version

    def update(self) -> bool:
        """Read what is new if that is quick; True if something changed."""
        if self.wants_build:
            return False
        return self.index.update()

    def built(self) -> None:
        """Take over an index that was built by another process, and the lines that came since."""
        # It has other segments and another place than the one in memory.
        self.index.reload()
        with self._lock:
            self._preview = None
            self._times = None
        self.update()

    def names(self) -> dict[str, int]:
        """Metrics and their number of values."""
        if self.is_partial:
            return {name: len(column.values) for name, column in self._sampled().columns.items()}
        return self.index.names()

    def newest(self) -> dict[str, float | str | None]:
        """The newest value of every metric."""
        if self.is_partial:
            return self._sampled().newest()
        return self.index.newest()

    def _sampled(self) -> RecordBlock:
        with self._lock:
            if self._preview is None:
                self._preview = sample_records(self.path)
            return self._preview

    def _column(self, name: str) -> Column:
        if self.is_partial:
            return self._sampled().columns.get(name, ColumnBuffer()).arrays()
        return self.index.column(name)

    def points(self, metric: str, x: XAxis) -> tuple[np.ndarray, np.ndarray]:
        """Every point of a curve."""
        rows, values = self._column(metric)
        if x == "time":
            x_rows, x_values = self._time()
        else:
            x_rows, x_values = self._column(TOKENS if x == "tokens" else "step")

        if len(x_rows) == len(rows) and np.array_equal(x_rows, rows):
            return x_values, values

        # Points are the rows that have both. Rows are sorted: each is looked up among the x rows.
        indices = np.searchsorted(x_rows, rows)
        has_x = np.zeros(len(rows), dtype=bool)
        if len(x_rows):
            nearest = np.minimum(indices, len(x_rows) - 1)
            has_x = (indices < len(x_rows)) & (x_rows[nearest] == rows)
        return x_values[indices[has_x]], values[has_x]

    def _time(self) -> Column:
        """Training seconds at each row."""
        version = self.version
        cached = self._times
        if cached is not None and cached[0] == version and not self.is_partial:
            return cached[1]

        rows, steps = self._column("step")
        step_seconds = np.zeros(len(rows))
        timed_rows, timings = self._column("step_seconds")
        # Records have a step, so that a row with a time is among the rows with a step.
        indices = np.searchsorted(rows, timed_rows)
        is_known = indices < len(rows)
        timings = timings[is_known]
        step_seconds[indices[is_known]] = np.where(np.isfinite(timings), timings, 0.0)

        # Steps since the record before; negative after a rollback, which takes no time.
        gaps = steps
        if len(steps):
            gaps = np.diff(steps, prepend=steps[:1] - 1)

        times = (rows, np.cumsum(step_seconds * np.maximum(gaps, 0.0)))
        self._times = (version, times)
        return times

    def view(self, metric: str, window: Window) -> Curve:
        """A curve for a screen; the same one is computed once for all who look."""
        key = (self.version, metric, window)
        # A preview is replaced without a new version: it is not kept.
        is_partial = self.is_partial
        with self._lock:
            if key in self._views and not is_partial:
                self._views.move_to_end(key)
                return self._views[key]

        x, y = self.points(metric, window.x)
        curve = downsample(x, y, window.points, window.start, window.end)
        if not is_partial:
            with self._lock:
                # Keys begin with the version. Nobody asks for curves of an older one again.
                if self._views and next(reversed(self._views))[0] != key[0]:
                    self._views.clear()
                self._views[key] = curve
                while len(self._views) > KEPT_VIEWS:
                    self._views.popitem(last=False)

        return curve

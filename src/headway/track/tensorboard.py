"""TensorBoard: every number of a logged step as a curve in run_dir/tensorboard."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.section import setting
from headway.errors import ConfigError
from headway.track.base import Event, TrackerConfig, Value, flatten

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
MOST_WAITING = 20_000
"""Logged steps."""
FLUSH_SECONDS = 30.0
RETRY_SECONDS = 5.0
log = logging.getLogger("headway")


class Config(TrackerConfig):
    """Curves for `tensorboard --logdir runs`."""

    kind: str = setting("tensorboard", "tensorboard.", on_resume="free")

    def build(self, run_dir: Path, run_name: str) -> TensorBoard:
        """The tracker of a run."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("track kind is 'tensorboard'; the package tensorboard is not installed. Run pip install tensorboard.")
        return TensorBoard(run_dir / FOLDER)


class TensorBoard:
    """Event files, begun with the first step: what an earlier start of the run wrote at or after that step is then hidden.

    Points are kept until they are known to be in the file. Where it cannot be written they wait, and a new file begins with them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._notes: list[str] = []
        self._waiting: deque[Point] = deque(maxlen=MOST_WAITING)
        self._handed: deque[Point] = deque(maxlen=MOST_WAITING)
        """Given to the writer, which has not flushed them yet."""
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        self._retry_at = 0.0

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a point to each curve. Values that are no numbers (null) have no point."""
        self._step = step
        self._take(flatten(metrics))
        if time.monotonic() >= self._retry_at:
            self._write(flush=time.monotonic() >= self._flush_at)

    def note(self, text: str) -> None:
        """Add a remark at the last step; before the first one it waits for it."""
        self._notes.append(text)

    def event(self, name: Event, text: str, step: int) -> None:
        """Add what happened to the remarks; written with the next step, by the thread that writes steps."""
        self._notes.append(f"{name} at step {step}: {text}")

    def close(self) -> None:
        """Write out the curves."""
        if self._notes and self._step:
            self._take({})
        self._write(flush=True)
        self._drop_writer()

    def _take(self, values: dict[str, Value]) -> None:
        notes, self._notes = self._notes, []
        self._waiting.append(Point(self._step, values, notes))

    def _write(self, *, flush: bool) -> None:
        """Hand on what waits; a failure is logged, and tried again later with all that was not flushed."""
        try:
            while self._waiting:
                self._add(self._waiting[0])
                self._handed.append(self._waiting.popleft())
            if flush and self._writer is not None:
                self._writer.flush()
                self._handed.clear()
                self._flush_at = time.monotonic() + FLUSH_SECONDS
        except OSError as problem:
            if not self._retry_at:
                log.warning("%s cannot be written: %s; its points wait in memory", self.folder, problem.strerror or problem)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._waiting.extendleft(reversed(self._handed))
            self._handed.clear()
            self._drop_writer()
            return
        self._retry_at = 0.0

    def _add(self, point: Point) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=point.step)
        for name, value in point.values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, point.step)
        for text in point.notes:
            self._writer.add_text("notes", text, point.step)

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError:
            return  # it has failed already; what it held is still here


@dataclass(frozen=True)
class Point:
    """The numbers and remarks of one step."""

    step: int
    values: dict[str, Value]
    notes: list[str]

"""TensorBoard: every metric of a logged step becomes a curve in run_dir/tensorboard."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.section import setting
from headway.runtime.optional import how_to_get
from headway.track.base import Event, TrackerConfig, Value, flatten

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("headway")

FOLDER = "tensorboard"
MAX_QUEUED_STEPS = 20_000
"""Steps that wait in memory while the disk cannot be written; older ones are lost."""
FLUSH_SECONDS = 30.0
"""How often steps are flushed to disk."""
RETRY_SECONDS = 5.0
"""How long after a failed write the next one is tried."""


class Config(TrackerConfig):
    """Curves for `tensorboard --logdir runs`."""

    kind: str = setting("tensorboard", "tensorboard.", on_resume="free")

    def build(self, run_dir: Path, run_name: str) -> TensorBoard | None:
        """Make the tracker.

        Without the package the run continues: metrics.jsonl has the same numbers.
        """
        if (command := how_to_get("tensorboard")) is not None:
            log.info(
                "no TensorBoard curves: tensorboard is not installed (%s); "
                "metrics.jsonl has the same numbers",
                command,
            )
            return None
        return TensorBoard(run_dir / FOLDER)


class TensorBoard:
    """Writes event files, the first one at the first step.

    A file hides points that earlier files have at or after its first step: those of an earlier
    start of the run that the run does again.

    Steps stay in memory until they are flushed. If a write fails, they wait and go into a new file.

        log -> _waiting -> the writer, and _unflushed -> flush: forgotten
                  ^----------------------'  a write fails
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._step = 0
        """The last step; 0 before the first."""
        self._notes: list[str] = []
        self._waiting: deque[LoggedStep] = deque(maxlen=MAX_QUEUED_STEPS)
        """Steps that the writer does not have yet."""
        self._unflushed: deque[LoggedStep] = deque(maxlen=MAX_QUEUED_STEPS)
        """Steps that the writer has, but perhaps not the disk."""
        self._flush_at = time.monotonic() + FLUSH_SECONDS
        self._retry_at = 0.0
        """No write is tried before this time; 0 while writes succeed."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a point to each curve. Null values add no point."""
        self._step = step
        self._enqueue(flatten(metrics))
        if time.monotonic() >= self._retry_at:
            self._write(flush=time.monotonic() >= self._flush_at)

    def note(self, text: str) -> None:
        """Add a note; it is written with the next step."""
        self._notes.append(text)

    def event(self, name: Event, text: str, step: int) -> None:
        """Add an event to the notes; the thread that logs steps writes it with the next step."""
        self._notes.append(f"{name} at step {step}: {text}")

    def close(self) -> None:
        """Flush the curves and notes."""
        # Notes since the last step; before the first one there is no file to write them to.
        if self._notes and self._step:
            self._enqueue({})
        self._write(flush=True)
        self._drop_writer()

    def _enqueue(self, values: dict[str, Value]) -> None:
        # Another thread may add a note: the list is taken away whole.
        notes = self._notes
        self._notes = []
        self._waiting.append(LoggedStep(self._step, values, notes))

    def _write(self, *, flush: bool) -> None:
        """Write the queued steps.

        After a failure, log it and retry later with everything that was not flushed.
        """
        try:
            while self._waiting:
                self._add(self._waiting[0])
                self._unflushed.append(self._waiting.popleft())
            if flush and self._writer is not None:
                self._writer.flush()
                self._unflushed.clear()
                self._flush_at = time.monotonic() + FLUSH_SECONDS
        except OSError as problem:
            # Once, at the first failure.
            if not self._retry_at:
                log.warning(
                    "%s cannot be written: %s; its points stay in memory and are retried",
                    self.folder,
                    problem.strerror or problem,
                )
            # The file may end in half a record, so the next try begins a new file, with all steps
            # that were not flushed.
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._waiting.extendleft(reversed(self._unflushed))
            self._unflushed.clear()
            self._drop_writer()
            return
        self._retry_at = 0.0

    def _add(self, logged: LoggedStep) -> None:
        """Give one step to the writer, which is made with the first one."""
        writer = self._writer
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step hides what an earlier file has of this step and later ones.
            self._writer = writer = SummaryWriter(str(self.folder), purge_step=logged.step)
        for name, value in logged.values.items():
            if isinstance(value, (int, float)):
                writer.add_scalar(name, value, logged.step)
        for text in logged.notes:
            writer.add_text("notes", text, logged.step)

    def _drop_writer(self) -> None:
        writer = self._writer
        self._writer = None
        try:
            if writer is not None:
                writer.close()
        except OSError:
            return  # the write failed before; the unflushed steps are still in memory


@dataclass(frozen=True)
class LoggedStep:
    """The metrics and notes of one step."""

    step: int
    values: dict[str, Value]
    notes: list[str]

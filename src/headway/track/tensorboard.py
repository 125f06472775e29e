"""TensorBoard: every number of a logged step as a curve in run_dir/tensorboard."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.section import setting
from headway.errors import ConfigError
from headway.track.base import Event, TrackerConfig, flatten

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class Config(TrackerConfig):
    """Curves for `tensorboard --logdir runs`."""

    kind: str = setting("tensorboard", "tensorboard.", on_resume="free")

    def build(self, run_dir: Path, run_name: str) -> TensorBoard:
        """The tracker of a run."""
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("track kind is 'tensorboard'; the package tensorboard is not installed. Run pip install tensorboard.")
        return TensorBoard(run_dir / FOLDER)


class TensorBoard:
    """Event files, begun with the first step: what an earlier start of the run wrote at or after that step is then hidden."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: SummaryWriter | None = None
        self._step = 0
        self._notes: list[str] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a point to each curve. Values that are no numbers ("unknown", null) have no point."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step)
        self._step, writer = step, self._writer
        for name, value in flatten(metrics).items():
            if isinstance(value, (int, float)):
                writer.add_scalar(name, value, step)
        self._write_notes(writer)

    def note(self, text: str) -> None:
        """Add a remark at the last step; before the first one it waits for it."""
        self._notes.append(text)
        if self._writer is not None:
            self._write_notes(self._writer)

    def event(self, name: Event, text: str, step: int) -> None:
        """Add what happened to the remarks; written with the next step, by the thread that writes steps."""
        self._notes.append(f"{name} at step {step}: {text}")

    def close(self) -> None:
        """Write out the curves."""
        if self._writer is not None:
            self._write_notes(self._writer)
            self._writer.close()
            self._writer = None

    def _write_notes(self, writer: SummaryWriter) -> None:
        notes, self._notes = self._notes, []
        for text in notes:
            writer.add_text("notes", text, self._step)

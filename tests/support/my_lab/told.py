"""A callback of one's own: leaves the steps it saw in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.track.callbacks import Callback


class Told(Callback):
    """Counts."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append(step)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        (Path(summary["run"]) / "told.txt").write_text(" ".join(map(str, self.steps)))

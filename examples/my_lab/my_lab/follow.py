"""A callback: writes the best validation loss so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headway as hw


class Best(hw.Callback):
    def __init__(self) -> None:
        self.best = float("inf")

    def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        self.best = min([self.best, *(numbers["loss"] for numbers in metrics.values())])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        (Path(summary["run"]) / "best.txt").write_text(f"{self.best:.4f}\n")

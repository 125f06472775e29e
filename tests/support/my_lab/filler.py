"""A tracker that makes the disk full at one step and gives room at another, for tests of what a run does meanwhile."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.section import setting
from headway.track.base import Event, TrackerConfig


class Config(TrackerConfig):
    """Fills and frees."""

    kind: str = setting("support.my_lab.filler", "filler.", on_resume="free")

    def build(self, run_dir: Path, run_name: str) -> "Filler":
        """The tracker."""
        return Filler()


class Filler:
    """Makes a mark from one step to another."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        first, last = map(int, os.environ["FILL_FROM_TO"].split(","))
        if step == first:
            Path(os.environ["FILL_MARK"]).touch()
        if step == last:
            Path(os.environ["FILL_MARK"]).unlink()

    def note(self, text: str) -> None: ...

    def event(self, name: Event, text: str, step: int) -> None: ...

    def close(self) -> None: ...

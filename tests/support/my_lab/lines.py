"""A tracker of one's own: one line of text per logged step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.section import setting
from headway.track.base import TrackerConfig


class Config(TrackerConfig):
    """Settings of the text file."""

    kind: str = setting("support.my_lab.lines", "This module.")
    file: str = setting("steps.txt", "Name of the file in the run folder.")

    def build(self, run_dir: Path, run_name: str) -> Any:
        return Lines(run_dir / self.file)


class Lines:
    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{step} {metrics['loss']}\n")

    def note(self, text: str) -> None: ...

    def event(self, name: str, text: str, step: int) -> None: ...

    def close(self) -> None: ...

"""A tracker: one line of text for each logged step and each event."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.plugin import Event, TrackerConfig, setting


class Config(TrackerConfig):
    """Settings of the text log."""

    kind: str = setting("my_lab.text_log", "This module.")
    file: str = setting("log.txt", "Name of the file in the run folder.")

    def build(self, run_dir: Path, run_name: str) -> TextLog:
        return TextLog(run_dir / self.file)


class TextLog:
    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._write(f"{step} loss {metrics.get('loss')}")

    def event(self, name: Event, text: str, step: int) -> None:
        self._write(f"{step} {name}: {text}")

    def note(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        pass

    def _write(self, line: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

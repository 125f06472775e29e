"""metrics.jsonl, the source of truth: one line of JSON per step, ever. Always written; not a kind one chooses.

    {"step": 3, "loss": 5.21, ..., "time": {"step_seconds": 0.4, ...}}

All fields but `time` are the same in every rerun of a recipe. JSON has no NaN or infinity: such a value is written as null and named in
`non_finite`, e.g. {"step": 7, "loss": null, "non_finite": {"loss": "nan"}}.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.errors import DataError
from headway.runtime.storage import write_atomic, writing


class MetricsFile:
    """A metrics.jsonl that is appended to. Holds no open file, so nothing is lost if the process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record, which has a `step`, in a single write."""
        assert "step" in record, "a line of metrics belongs to a step"
        non_finite: dict[str, str] = {}
        plain = {key: _finite(value, key, non_finite) for key, value in record.items()}
        if non_finite:
            plain["non_finite"] = non_finite
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with writing(self.path, len(line)), open(self.path, "ab") as file:
            file.write(line)

    def sync(self) -> None:
        """Wait until all lines are on the disk, for instance before a checkpoint that follows them."""
        if self.path.exists():
            with writing(self.path), open(self.path, "ab") as file:
                os.fsync(file.fileno())

    def cut_to(self, step: int) -> None:
        """Drop the lines of later steps and a line that a killed process left torn, so that a resumed run writes each step once."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        kept: list[bytes] = []
        for number, line, record in _lines(content):
            if record is None and number <= content.count(b"\n"):
                logging.getLogger("headway").warning("%s: line %d is damaged and was dropped", self.path, number)
            elif record is not None and record["step"] <= step:
                kept.append(line)
        if (new := b"".join(kept)) != content:
            write_atomic(self.path, new)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl in order. A torn last line (a run that is writing, or was killed) is left out."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise DataError(f"{path}: cannot be read: {problem.strerror}. Give the metrics.jsonl of a run folder.") from None
    records: list[dict[str, Any]] = []
    for number, _, record in _lines(content):
        if record is not None:
            records.append(record)
        elif number <= content.count(b"\n"):
            raise DataError(f"{path}:{number}: not a line of metrics. Remove the line.")
    return records


def _lines(content: bytes) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Line number, bytes and record of each line; the record is None where the line is not one."""
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        is_whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
        yield number, line, record if is_whole else None


def _finite(value: Any, at: str, non_finite: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(below, f"{at}/{key}", non_finite) for key, below in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[at] = str(value)
        return None
    return value

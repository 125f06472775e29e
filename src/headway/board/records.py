"""Lines of metrics.jsonl come in; columns of float64 go out. The numbers are exactly those of the file.

    {"step": 3, "loss": 5.2, "time": {"mfu": 0.4}}     ->   step [3.0]   loss [5.2]   mfu [0.4]

A column has the values and the rows they stand in, because not every record has every metric. Names are those of `track.base.flatten`.
A value that JSON cannot hold (NaN, infinity) is null in the file and named in `non_finite`; here it is that value again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

MAX_COLUMNS = 4096
"""Per run. A file with more different names is not a file of metrics."""
MAX_NAME = 300


class ColumnBuffer:
    """One metric that grows: rows and values."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows, self.values = array("I"), array("d")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of rows and values."""
        return np.array(self.rows, dtype=np.uint32), np.array(self.values, dtype=np.float64)


class RecordBlock:
    """The records of some lines as columns. `first_row` is the number of the row that comes next in the whole file."""

    def __init__(self, first_row: int = 0) -> None:
        self.first_row = self.rows = first_row
        self.columns: dict[str, ColumnBuffer] = {}
        self.latest: dict[str, float | str | None] = {}
        """The values of the newest record, and of older ones that it lacks."""
        self.damaged = 0

    def add(self, lines: bytes) -> None:
        """Add complete lines. A damaged line is counted and left out."""
        records = _parse(lines)
        if records is None:
            records = []
            for line in lines.split(b"\n"):
                if line.strip():
                    found = _parse(line)
                    records += found or [None]
        for record in records:
            if isinstance(record, dict) and type(record.get("step")) is int:
                self._add(record)
            else:
                self.damaged += 1

    def _add(self, record: dict[str, Any]) -> None:
        row = self.rows
        non_finite = record.get("non_finite")
        columns = self.columns
        for name, value in _flat(record, non_finite if isinstance(non_finite, dict) else None):
            column = columns.get(name)
            if column is None:
                if len(columns) >= MAX_COLUMNS or len(name) > MAX_NAME:
                    continue
                column = columns[name] = ColumnBuffer()
            column.rows.append(row)
            column.values.append(value)
        self.rows = row + 1
        for name, text in record.items():
            if type(text) is str and len(text) <= MAX_NAME:
                self.latest[name] = text

    def newest(self) -> dict[str, float | str | None]:
        """The newest value of every metric and text."""
        return {name: column.values[-1] for name, column in self.columns.items()} | self.latest


def _parse(lines: bytes) -> list[Any] | None:
    """All records of some lines at once, which is faster than one by one; None if one of them is damaged."""
    try:
        found: Any = json.loads(b"[" + b",".join(lines.strip().split(b"\n")) + b"]")
    except (ValueError, RecursionError):
        return None
    return found


def _flat(record: Mapping[str, Any], non_finite: Mapping[str, Any] | None) -> Iterable[tuple[str, float]]:
    """Names and values of one record, like `track.base.flatten` without texts; the step is among them."""
    for key, value in record.items():
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            yield key, _number(value)
        elif kind is dict:
            if key != "non_finite":
                prefix = "" if key == "time" else f"{key}/"
                yield from _nested(value, key, prefix, f"{key}/", non_finite)
        elif value is None and non_finite is not None and key in non_finite:
            yield key, _special(non_finite[key])


def _nested(
    values: Mapping[str, Any], key: str, prefix: str, where: str, non_finite: Mapping[str, Any] | None, depth: int = 0
) -> Iterable[tuple[str, float]]:
    if depth > 8:
        return
    if len(values) == 1 and type(values.get(key)) is dict:  # a single validation set needs no name
        values, where = values[key], f"{where}{key}/"
    for name, value in values.items():
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            yield prefix + name, _number(value)
        elif kind is dict:
            yield from _nested(value, name, f"{prefix}{'' if name == 'time' else name + '/'}", f"{where}{name}/", non_finite, depth + 1)
        elif value is None and non_finite is not None and where + name in non_finite:
            yield prefix + name, _special(non_finite[where + name])


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond any float
        return float("inf") if value > 0 else float("-inf")


def _special(text: Any) -> float:
    return {"inf": float("inf"), "-inf": float("-inf")}.get(str(text), float("nan"))

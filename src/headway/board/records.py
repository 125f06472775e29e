"""Lines of metrics.jsonl come in; columns of float64 go out. The numbers are exactly those of the
file.

    {"step": 3, "loss": 5.2, "time": {"mfu": 0.4}}     ->   step [3.0]   loss [5.2]   mfu [0.4]

A column has the values and the rows they stand in, because not every record has every metric. Names
are those of `track.base.flatten`. A value that JSON cannot hold (NaN, infinity) is null in the file
and named in `non_finite`; here it is that value again.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

MAX_COLUMNS = 4096
"""Per run. A file with more different names is not a file of metrics."""
MAX_NAME = 300
"""Characters of a metric's name, and of a text that is shown."""
MAX_NESTING = 8
"""Levels of a record; deeper values are left out."""
LARGEST_INT = 1 << 1000
"""Any whole number below it has a float64."""


class ColumnBuffer:
    """One metric that grows: rows and values."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("I")
        self.values = array("d")

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of rows and values."""
        return np.array(self.rows, dtype=np.uint32), np.array(self.values, dtype=np.float64)


class RecordBlock:
    """The records of some lines as columns.

    `first_row` is the number of the row that comes next in the whole file.
    """

    def __init__(self, first_row: int = 0) -> None:
        self.first_row = self.rows = first_row
        self.columns: dict[str, ColumnBuffer] = {}
        self.latest: dict[str, float | str | None] = {}
        """The values of the newest record, and of older ones that it lacks."""
        self.damaged = 0
        self._adders: dict[str, tuple[Callable[[int], None], Callable[[float], None]]] = {}
        """By metric, the bound `append` of its rows and of its values, for speed."""

    def add(self, lines: bytes) -> None:
        """Add complete lines. A damaged line is counted and left out."""
        # Nearly always all lines are sound.
        records = _parse(lines)
        if records is None:
            # One of them is damaged: line by line, None for each that is.
            records = []
            for line in lines.split(b"\n"):
                if line.strip():
                    records += _parse(line) or [None]

        for record in records:
            # A record without a step has no place on any axis.
            if isinstance(record, dict) and type(record.get("step")) is int:
                self._add(record)
            else:
                self.damaged += 1

    def _add(self, record: dict[str, Any]) -> None:
        """One record. Written for speed: a board reads millions of them."""
        adders = self._adders
        row = self.rows
        for key, value in record.items():
            kind = type(value)
            if kind is float or kind is int:
                adder = adders.get(key)
                # A new metric, or a whole number that no float holds.
                if adder is None or (kind is int and not -LARGEST_INT < value < LARGEST_INT):
                    self._append(key, _number(value))
                else:
                    adder[0](row)
                    adder[1](value)
            elif kind is dict:
                if key == "time":
                    # Names under `time` stand alone: mfu, not time/mfu.
                    for name, nested_value in value.items():
                        adder = adders.get(name)
                        if adder is None or type(nested_value) is not float:
                            self._add_other(name, nested_value, "time/", record)
                        else:
                            adder[0](row)
                            adder[1](nested_value)
                elif key != "non_finite":
                    for name, number in _nested(
                        value, key, f"{key}/", f"{key}/", _non_finite(record)
                    ):
                        self._append(name, number)
            else:
                self._add_other(key, value, "", record)

        self.rows = row + 1

    def _add_other(self, name: str, value: Any, where: str, record: dict[str, Any]) -> None:
        """A value that is no float: a whole number, a text, nothing, or a number JSON cannot
        hold.
        """
        kind = type(value)
        if kind is int or kind is bool or kind is float:
            self._append(name, _number(value))
        elif kind is str:
            if len(value) <= MAX_NAME:
                self.latest[name] = value
        elif value is None:
            non_finite = _non_finite(record)
            if non_finite is not None and where + name in non_finite:
                self._append(name, _special(non_finite[where + name]))
        elif kind is dict:
            for nested_name, number in _nested(
                value, name, f"{name}/", f"{where}{name}/", _non_finite(record)
            ):
                self._append(nested_name, number)

    def _append(self, name: str, value: float) -> None:
        column = self.columns.get(name)
        if column is None:
            if len(self.columns) >= MAX_COLUMNS or len(name) > MAX_NAME:
                return
            column = self.columns[name] = ColumnBuffer()
            self._adders[name] = (column.rows.append, column.values.append)
        column.rows.append(self.rows)
        column.values.append(value)

    def newest(self) -> dict[str, float | str | None]:
        """The newest value of every metric and text."""
        return {name: column.values[-1] for name, column in self.columns.items()} | self.latest


def _parse(lines: bytes) -> list[Any] | None:
    """All records of some lines at once, which is faster than one by one.

    None if one of them is damaged.
    """
    joined = b",".join(lines.strip().split(b"\n"))
    try:
        return json.loads(b"[" + joined + b"]")
    except (ValueError, RecursionError):
        return None


def _non_finite(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Path of a value -> "nan", "inf" or "-inf"; None where all values are finite."""
    paths = record.get("non_finite")
    return paths if isinstance(paths, dict) else None


def _nested(
    values: Mapping[str, Any],
    key: str,
    prefix: str,
    where: str,
    non_finite: Mapping[str, Any] | None,
    depth: int = 0,
) -> Iterable[tuple[str, float]]:
    """The numbers below one key, by the names of metrics: {"a": {"loss": 1}} of valid is
    valid/a/loss.

    `prefix` is the beginning of these names, `where` that of paths in `non_finite`. They differ:
    names leave some levels out, paths do not.
    """
    if depth > MAX_NESTING:
        return

    # {"valid": {"valid": {...}}}: a single validation set needs no name.
    if len(values) == 1 and type(values.get(key)) is dict:
        values = values[key]
        where = f"{where}{key}/"

    for name, value in values.items():
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            yield prefix + name, _number(value)
        elif kind is dict:
            nested_prefix = prefix if name == "time" else f"{prefix}{name}/"
            yield from _nested(value, name, nested_prefix, f"{where}{name}/", non_finite, depth + 1)
        elif value is None and non_finite is not None and where + name in non_finite:
            yield prefix + name, _special(non_finite[where + name])


def _number(value: float) -> float:
    """A number as a float; one beyond any float is infinite."""
    try:
        return float(value)
    except OverflowError:  # an integer beyond any float
        if value > 0:
            return float("inf")
        return float("-inf")


def _special(text: Any) -> float:
    """A word of `non_finite` as its value."""
    return {"inf": float("inf"), "-inf": float("-inf")}.get(str(text), float("nan"))

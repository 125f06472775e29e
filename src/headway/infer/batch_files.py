"""The two files of a batch job: lines of JSON come in one by one, lines of answers go out in the
same order and survive a kill.

    answers.jsonl             whole lines, the answers to the first lines of the input; a line that
                              a kill cut short is removed
    answers.jsonl.settings    what decides the answers: the same command continues, another one is
                              refused

Neither file is ever held in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from headway.config.regular_file import regular_only
from headway.errors import ConfigError, DataError
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_atomic
from headway.text.raw import RawFile

MAX_LINE_BYTES = 64 << 20
"""A longer line is no record but another kind of file."""
BLOCK_BYTES = 1 << 20
"""Read at once when the lines of an output are counted."""
INDEX, GENERATIONS, ERROR = "index", "generations", "error"
RESERVED = (INDEX, GENERATIONS, ERROR)
DIGEST = "_digest"
"""Ends the names of settings that are digests of a part of the model."""


@dataclass(frozen=True)
class BatchLine:
    """One line of the input."""

    index: int
    place: str
    record: dict[str, Any] | None
    """None where the line is no JSON object."""
    problem: str | None = None

    def answered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The line of the output: the record's own fields are kept."""
        return {INDEX: self.index, **(self.record or {}), **values}


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The lines of a .jsonl file, which may be compressed; blank ones are skipped. A line that
    cannot be read has its problem."""
    with RawFile.at(path).open() as stream:
        index = number = 0
        while data := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB. Give "
                    "one record per line."
                )
            if data.strip():
                yield _parsed(data, index, f"{path}:{number}")
                index += 1


def _parsed(data: bytes, index: int, place: str) -> BatchLine:
    try:
        # Only the first line may begin with a byte order mark.
        record = json.loads(data.decode("utf-8-sig" if index == 0 else "utf-8"))
    except (ValueError, RecursionError) as problem:
        return BatchLine(index, place, None, f"not JSON: {' '.join(str(problem).split())[:200]}")
    if not isinstance(record, dict):
        return BatchLine(
            index, place, None, f"a line must be an object, not {type(record).__name__}"
        )
    taken = [key for key in RESERVED if key in record]
    # The output keeps a record's fields beside the answers, so their names may not collide.
    if taken:
        rest = {key: value for key, value in record.items() if key not in RESERVED}
        return BatchLine(
            index, place, rest, f"has the key {taken[0]!r}, which the answers use. Rename it"
        )
    return BatchLine(index, place, record)


def settings_file(output: Path) -> Path:
    """Where the settings of a job are that writes `output`."""
    return output.with_name(output.name + ".settings")


def require_same(output: Path, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to continue a job with other settings than it was begun with.

    Settings of earlier versions have no digests; what they were begun with is not known.
    """
    for key in {**before, **settings}:
        if before.get(key) == settings.get(key):
            continue
        if key.endswith(DIGEST):
            if key in before:
                part = key.removesuffix(DIGEST)
                raise ConfigError(
                    f"--output is {output}, which was begun with other content of model "
                    f"{_shown(settings.get('model'))}: its {part} changed (sha256 "
                    f"{_shown(before[key])}, now {_shown(settings.get(key))}). Give another file, "
                    "or the same model."
                )
            continue
        raise ConfigError(
            f"--output is {output}, which was begun with {key} {_shown(before.get(key))}; now it "
            f"is {_shown(settings.get(key))}. Give another file, or the same settings."
        )


class BatchOutput:
    """The answers of a job, open for more of them."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._settings = dict(settings)
        self._side = settings_file(path)
        self.kept = 0
        """Lines that were there."""
        self._last: dict[str, Any] | None = None

    def __enter__(self) -> BatchOutput:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # An empty file may have come from anywhere; it is taken.
        if self.path.exists() and self.path.stat().st_size:
            self._check_settings()
            self._count()
        try:
            # First: an output that cannot be one leaves no settings beside it.
            self._file = open(self.path, "ab", opener=regular_only)
            write_atomic(self._side, json.dumps(self._settings, indent=2) + "\n")
        except OSError as problem:
            raise ConfigError(
                f"--output is {self.path}; it cannot be written: {problem.strerror}."
            ) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def _check_settings(self) -> None:
        if not self._side.is_file():
            raise ConfigError(
                f"--output is {self.path}, which exists, without {self._side.name}: it was not "
                "written by this verb. Give another file."
            )
        require_same(self.path, read_object(self._side, ConfigError), self._settings)

    def _count(self) -> None:
        """Count whole lines, cut a torn one, and read the last."""
        size = whole = last = 0
        with open(self.path, "rb", opener=regular_only) as file:
            while block := file.read(BLOCK_BYTES):
                newline = -1
                while (newline := block.find(b"\n", newline + 1)) >= 0:
                    last = whole
                    whole = size + newline + 1
                    self.kept += 1
                size += len(block)
            if self.kept:
                file.seek(last)
                self._last = _object(file.read(whole - last))
        if self.kept and (self._last is None or self._last.get(INDEX) != self.kept - 1):
            raise ConfigError(
                f"--output is {self.path}, whose line {self.kept} is no answer of this job. Give "
                "another file."
            )
        # Only after the checks: a file that is not ours is left as it is.
        if whole < size:
            os.truncate(self.path, whole)

    def skip(self, lines: Iterator[BatchLine]) -> None:
        """Pass over the lines of the input that have answers; the last of them must be the one that
        was answered."""
        line: BatchLine | None = None
        for _ in range(self.kept):
            line = next(lines, None)
            if line is None:
                raise ConfigError(
                    f"--output is {self.path}, which has more lines than the input. Give another "
                    "file, or remove it."
                )
        # One line is compared, the last: an input that only has more lines now is the same input.
        last = self._last
        if (
            line is not None
            and last is not None
            and any(last.get(key) != value for key, value in line.answered({}).items())
        ):
            raise ConfigError(
                f"--output is {self.path}, whose line {self.kept} is of another input. Give "
                "another file, or remove it."
            )

    def write(self, values: Mapping[str, Any]) -> None:
        """One line. It is with the system when this returns, so that a kill of the process does not
        lose it."""
        assert self._file is not None
        self._file.write(
            json.dumps(values, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        )
        self._file.flush()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= 80:
        return text
    return text[:77] + "..."

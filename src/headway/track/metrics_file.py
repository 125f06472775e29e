"""metrics.jsonl, the source of truth: exactly one line of JSON per logged step.

Always written.

    {"step": 3, "loss": 5.21, ..., "time": {"step_seconds": 0.4, ...}}

All fields but `time` are identical in every rerun of a recipe. JSON has no NaN or infinity: such a
value is written as null and named in `non_finite`, e.g. {"step": 7, "loss": null, "non_finite":
{"loss": "nan"}}.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.deferred import Deferred
from headway.runtime.storage import CHUNK_BYTES, fsync_file, fsync_folder
from headway.runtime.temporary import temporary_name

LONGEST_LINE = 4 << 20
"""Bytes. Anything longer without a line end is treated as damage."""
TAIL_BYTES = 8 << 20
"""Bytes that a resuming run reads at a time, from the end of the file backwards."""
log = logging.getLogger("headway")


class MetricsFile:
    """Appends to a metrics.jsonl.

    Keeps no file open. Lines that cannot be written wait in `writes`; a failed write never ends a
    run.
    """

    def __init__(self, path: Path, writes: Deferred | None = None) -> None:
        self.path = path
        self.writes = writes or Deferred()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record of one step in a single write."""
        assert "step" in record, "a record of metrics needs a step"
        non_finite: dict[str, str] = {}
        plain = {key: _finite(value, key, non_finite) for key, value in record.items()}
        if non_finite:
            plain["non_finite"] = non_finite
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self.writes.append(self.path, line)

    def sync(self) -> None:
        """Flush all lines to disk, e.g. before a checkpoint is written."""
        # A descriptor opened for reading serves as well: fsync concerns the file, not the writer.
        self.writes.retry()
        try:
            with open(self.path, "rb", opener=regular_only) as file:
                fsync_file(file.fileno())
        except FileNotFoundError:
            return
        except OSError as problem:
            log.warning("%s: cannot be flushed to disk: %s", self.path, problem.strerror)

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and an incomplete last line, so that a resumed run writes
        each step once.

        Steps increase, so only the end of the file is read. Damaged lines found there are dropped
        with a warning.
        """

        def is_later(line: bytes) -> bool:
            record = _record(line)
            return record is not None and record["step"] > step

        # Lines that wait for a full disk would be written behind the truncation.
        self.writes.drop(self.path, is_later)
        try:
            with open(self.path, "r+b", opener=regular_only) as file:
                _truncate_after(self.path, file, step)
        except FileNotFoundError:
            return
        except OSError as problem:
            log.warning(
                "%s: cannot remove the lines after step %d: %s", self.path, step, problem.strerror
            )

    def repair(self) -> None:
        """Rewrite the file without its damaged lines. If that fails, the file stays unchanged."""
        temporary = temporary_name(self.path)
        try:
            with open(self.path, "rb", opener=regular_only) as file, open(temporary, "xb") as new:
                for line in read_lines(file):
                    if _record(line) is not None:
                        new.write(line)
                new.flush()
                fsync_file(new.fileno())
            os.replace(temporary, self.path)
            fsync_folder(self.path.parent)
        except OSError as problem:
            log.warning("%s: cannot remove the damaged lines: %s", self.path, problem.strerror)
            temporary.unlink(missing_ok=True)


class MetricsReader:
    """Streams the records of a metrics.jsonl in order. Damaged lines are skipped and counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self.first_damaged = 0
        """The number of the first damaged line, from 1; 0 if there is none."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damaged = 0
        self.first_damaged = 0
        try:
            with open(self.path, "rb", opener=regular_only) as file:
                for number, line in enumerate(read_lines(file), start=1):
                    record = _record(line)
                    # A last line without its end is no damage: a run is writing, or was killed.
                    if record is not None:
                        yield record
                    elif line.endswith(b"\n"):
                        self.damaged += 1
                        self.first_damaged = self.first_damaged or number
        except OSError as problem:
            raise DataError(
                f"{self.path}: cannot be read: {problem.strerror}. "
                "Give the metrics.jsonl of a run folder."
            ) from None
        if self.damaged:
            log.warning(
                "%s: skipped %d damaged lines; the first is line %d",
                self.path,
                self.damaged,
                self.first_damaged,
            )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl as a list; damaged lines are skipped with a warning.

    For long runs use MetricsReader.
    """
    return list(MetricsReader(path))


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file with their line ends.

    A line longer than LONGEST_LINE is returned as an empty one.
    """
    while line := file.readline(LONGEST_LINE):
        if len(line) < LONGEST_LINE or line.endswith(b"\n"):
            yield line
            continue
        # Read on to its end, one piece at a time, and count it as one damaged line.
        while (piece := file.readline(LONGEST_LINE)) and not piece.endswith(b"\n"):
            pass
        yield b"\n"


def _truncate_after(path: Path, file: IO[bytes], step: int) -> None:
    """Read backwards, block by block, to the last line whose step is at most `step`.

    Remove what follows.
    """
    # Blocks from the end, until one has a line to keep. `end` is then where that block begins: all
    # before it stays as it is, of the block itself the lines in `tail`.
    size = file.seek(0, os.SEEK_END)
    end = size
    tail: list[bytes] = []
    damaged = 0
    while end > 0 and not tail:
        begin = _line_start(file, max(0, end - TAIL_BYTES))
        file.seek(begin)
        for line in file.read(end - begin).splitlines(keepends=True):
            record = _record(line)
            # A last line without its end is not counted: the killed run was writing it.
            if record is None:
                damaged += line.endswith(b"\n")
            elif record["step"] <= step:
                tail.append(line)
        end = begin
    if damaged:
        log.warning("%s: dropped %d damaged lines near its end", path, damaged)

    # If the kept lines stand together, the file is cut behind them, which takes no space on disk.
    kept = b"".join(tail)
    file.seek(end)
    if file.read(len(kept)) == kept:
        if end + len(kept) < size:
            file.truncate(end + len(kept))
        return

    # Damaged lines stood between them: write the file anew.
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as new:
            file.seek(0)
            _copy(file, new, end)
            new.write(kept)
            new.flush()
            fsync_file(new.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _line_start(file: IO[bytes], position: int) -> int:
    """Where the line that contains this byte begins, at most LONGEST_LINE bytes back."""
    earliest = max(0, position - LONGEST_LINE)
    file.seek(earliest)
    line_end = file.read(position - earliest).rfind(b"\n")  # -1 if there is none: then `earliest`
    return earliest + line_end + 1


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """Copy the next `size` bytes."""
    while size > 0 and (chunk := source.read(min(size, CHUNK_BYTES))):
        target.write(chunk)
        size -= len(chunk)


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is incomplete, damaged or has no step."""
    if not line.endswith(b"\n"):
        return None
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    # `type`, because True is an int for isinstance.
    values = cast(dict[str, Any], record)
    return values if type(values.get("step")) is int else None


def _finite(value: Any, path: str, non_finite: dict[str, str]) -> Any:
    """The value with None for numbers that are not finite; their names go into `non_finite`."""
    if isinstance(value, Mapping):
        return {key: _finite(child, f"{path}/{key}", non_finite) for key, child in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[path] = str(value)
        return None
    return value

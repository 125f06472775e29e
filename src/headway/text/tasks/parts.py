"""Inputs cut into parts of about the same size, and the documents of parts. In: files; out:
lists of parts, one list for each task.

    several small files             one task
    jsonl; txt by lines             ranges of bytes, cut at line ends
    parquet                         ranges of row groups
    everything else, compressed     whole files: they can be read only from their beginning

The cut depends on the files and the size of a task alone. Read in order, the parts give the
documents of `read_documents`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.runtime.optional import is_installed
from headway.text.document import Document, Reading, Record, TextSplit
from headway.text.formats import FORMATS
from headway.text.raw import MAGIC_BYTES, RawFile, compression_of
from headway.text.read import blocks_of, documents_of, no_documents, not_empty, records_of
from headway.text.section import FileSection

T = TypeVar("T")


@dataclass(frozen=True)
class InputPart:
    """A file or a part of one, as a task's arguments hold it."""

    name: str
    """As it was given: documents and messages say this."""
    path: str
    file_bytes: int
    changed_ns: int
    """With the size it stands for the content: a file that changes gives other tasks."""
    cut: Literal["whole", "lines", "rows"] = "whole"
    start: int = 0
    end: int = 0
    first_line: int | None = None
    """lines: the number of the first one, where it was counted."""

    @property
    def size(self) -> int:
        """Bytes of the part; of row groups about."""
        if self.cut != "lines":
            return self.file_bytes
        return self.end - self.start

    def open(self) -> RawFile:
        """The part for reading; a file that is not what the driver saw is an error."""
        path = Path(self.path)
        try:
            status = os.stat(path)
        except OSError as problem:
            raise DataError(
                f"{self.name}: cannot be read: {problem.strerror}. Every machine must see it as "
                f"{self.path}."
            ) from None

        # Tasks of one run must see the same file: line numbers and row numbers build on each other.
        if (status.st_size, status.st_mtime_ns) != (self.file_bytes, self.changed_ns):
            raise DataError(
                f"{self.name}: has changed since the work began. Run this again; finished tasks "
                "of other files are kept."
            )

        raw = RawFile.at(path, self.name)
        if self.cut == "lines":
            return replace(raw, section=FileSection(path, self.start, self.end, self.first_line))
        if self.cut == "whole":
            return raw

        return replace(raw, row_groups=(self.start, self.end))

    def counted(self) -> InputPart:
        """The part with the number of its first line, which takes a pass over what is before it."""
        if self.cut != "lines" or not self.start:
            return self
        section = FileSection(Path(self.path), self.start, self.end)
        return replace(self, first_line=1 + section.count_lines_before())


def cut_files(
    files: Sequence[Path], split: TextSplit, task_bytes: int, *, whole_files: bool = False
) -> list[list[InputPart]]:
    """The parts of each task, in order; `whole_files`: no file is cut."""
    tasks: list[list[InputPart]] = []
    pending: list[InputPart] = []
    size = 0
    for path in files:
        status = path.stat()
        file = InputPart(str(path), str(path.absolute()), status.st_size, status.st_mtime_ns)
        parts: list[InputPart] = []
        if not whole_files and status.st_size > task_bytes:
            parts = _cut(file, split, task_bytes)

        # The small files before a large one end their task, so that the order is kept.
        if parts:
            if pending:
                tasks.append(pending)
            tasks += [[part] for part in parts]
            pending = []
            size = 0
            continue

        pending.append(file)
        size += status.st_size
        if size >= task_bytes:
            tasks.append(pending)
            pending = []
            size = 0

    if pending:
        tasks.append(pending)
    return tasks


def _cut(file: InputPart, split: TextSplit, task_bytes: int) -> list[InputPart]:
    """The parts of a large file; none where it can only be read as a whole."""
    raw = RawFile.at(Path(file.path))
    kind = FORMATS.get(raw.suffix)
    with open(file.path, "rb", opener=regular_only) as stream:
        if compression_of(stream.read(MAGIC_BYTES)) is not None:
            return []

    if kind == "jsonl" or (kind == "txt" and split == "line"):
        # Any byte will do: `FileSection` moves both edges to line starts.
        ends = [
            min(start + task_bytes, file.file_bytes)
            for start in range(0, file.file_bytes, task_bytes)
        ]
        return [
            replace(file, cut="lines", start=start, end=end) for start, end in pairwise([0, *ends])
        ]

    if kind == "parquet" and is_installed("pyarrow"):
        return _cut_rows(file, task_bytes)

    return []


def _cut_rows(file: InputPart, task_bytes: int) -> list[InputPart]:
    """The parts of a Parquet file, of whole row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(file.path)
        sizes = [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError):
        # The task that reads it reports what is wrong.
        return []

    bounds = [0]
    size = 0

    # Row groups cannot be cut, so a part ends with the group that fills it.
    for group, group_bytes in enumerate(sizes, 1):
        size += group_bytes
        if size >= task_bytes or group == len(sizes):
            bounds.append(group)
            size = 0

    return [replace(file, cut="rows", start=start, end=end) for start, end in pairwise(bounds)]


def part_size(part: InputPart, parts: Sequence[InputPart]) -> int:
    """The bytes of a part for the progress line; row groups share those of their file."""
    if part.cut != "rows":
        return part.size
    return part.file_bytes // max(1, sum(other.path == part.path for other in parts))


def parts_of(arguments: Mapping[str, Any]) -> list[InputPart]:
    """The parts in a task's arguments."""
    return [InputPart(**part) for part in arguments["parts"]]


def as_arguments(parts: Sequence[InputPart]) -> list[dict[str, Any]]:
    """Parts as a task's arguments."""
    return [asdict(part) for part in parts]


def with_lines(parts: Sequence[InputPart], work: Callable[[Sequence[InputPart]], T]) -> T:
    """The result of `work(parts)`.

    An error in a range of a file may name a line, which is counted from the range's beginning.
    Then the work is done again with the true line numbers, so that counting costs time only where
    something is wrong.
    """
    try:
        return work(parts)
    except DataError:
        if all(part.cut != "lines" or not part.start for part in parts):
            raise

    return work([part.counted() for part in parts])


@dataclass
class PartCount:
    """What a task found in one part: documents, and the lines of a range, from which the numbers
    of later lines follow.
    """

    documents: int = 0
    lines: int = 0


def read_parts(
    parts: Sequence[InputPart], read: Callable[[RawFile], Iterator[T]], counts: list[PartCount]
) -> Iterator[tuple[int, T]]:
    """The items of parts, each with the number of its part; a whole file without items is an error.

    `counts` is filled.
    """
    for number, part in enumerate(parts):
        raw = part.open()
        count = PartCount()
        counts.append(count)
        items = read(raw)
        # A range may be empty; `check_not_empty` looks at all ranges of a file.
        if part.cut == "whole":
            items = not_empty(items, part.name)
        for item in items:
            count.documents += 1
            yield number, item

        if raw.section is not None:
            count.lines = raw.section.newlines


def document_reader(
    reading: Reading, keys: list[str] | None
) -> Callable[[RawFile], Iterator[Document]]:
    """A function that reads the documents of one part; only `keys` of the records are needed."""
    text_of = reading.text_of
    return lambda raw: documents_of(raw, text_of, reading.split, keys)


def block_reader(reading: Reading) -> Callable[[RawFile], Iterator[tuple[Document, Iterator[str]]]]:
    """A function that reads the documents of one part in blocks."""
    text_of = reading.text_of
    return lambda raw: blocks_of(raw, text_of, reading.split, text_of.keys())


def record_reader() -> Callable[[RawFile], Iterator[Record]]:
    """A function that reads the records of one part."""
    return records_of


def check_not_empty(
    tasks: Sequence[Sequence[InputPart]], results: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse a file that was read in ranges and has no documents in any."""
    documents: dict[str, int] = {}
    for parts, result in zip(tasks, results, strict=True):
        for part, (count, _) in zip(parts, result["counts"], strict=True):
            documents[part.name] = documents.get(part.name, 0) + count
    for name, count in documents.items():
        if not count:
            raise no_documents(name)


def first_lines(
    tasks: Sequence[Sequence[InputPart]], results: Sequence[Mapping[str, Any]]
) -> list[list[int]]:
    """For each part of each task, how much to add to its line numbers.

    Ranges count from 2 (`UNKNOWN_LINE`), because a task does not know how many lines are before
    its range. With the counts of all tasks that is known.
    """
    offsets: list[list[int]] = []
    lines_before: dict[str, int] = {}
    for parts, result in zip(tasks, results, strict=True):
        offsets.append([])
        for part, (_, lines) in zip(parts, result["counts"], strict=True):
            # Only ranges of lines after the first one of their file need an offset.
            before = 0
            offset = 0
            if part.start:
                before = lines_before.get(part.path, 0)
                if part.cut == "lines":
                    offset = before - 1

            offsets[-1].append(offset)
            lines_before[part.path] = 0
            if part.cut == "lines":
                lines_before[part.path] = before + lines

    return offsets

"""Inputs cut into parts of about the same size, and the documents of parts. In: files; out: lists of parts, one list for each task.

    several small files             one task
    jsonl; txt by lines             ranges of bytes, cut at line ends
    parquet                         ranges of row groups
    everything else, compressed     whole files: they can be read only from their beginning

The cut depends on the files and the size of a task alone. Read in order, the parts give the documents of `read_documents`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from headway.errors import DataError
from headway.runtime.optional import is_installed
from headway.text.document import Document, Reading, Record, TextSplit
from headway.text.formats import FORMATS
from headway.text.raw import RawFile, compression_of
from headway.text.read import blocks_of, documents_of, no_documents, not_empty, records_of
from headway.text.section import FileSection

T = TypeVar("T")


@dataclass(frozen=True)
class InputPart:
    """A file or a part of one."""

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
        return self.file_bytes if self.cut != "lines" else self.end - self.start

    def open(self) -> RawFile:
        """The part for reading; a file that is not what the driver saw is an error."""
        path = Path(self.path)
        try:
            found = os.stat(path)
        except OSError as problem:
            raise DataError(
                f"{self.name}: cannot be read: {problem.strerror}. Every machine must see it as {self.path}."
            ) from None
        if (found.st_size, found.st_mtime_ns) != (self.file_bytes, self.changed_ns):
            raise DataError(
                f"{self.name}: has changed since the work began. Run this again; finished tasks of other files are kept."
            )
        raw = RawFile.at(path, self.name)
        if self.cut == "lines":
            return replace(raw, section=FileSection(path, self.start, self.end, self.first_line))
        return raw if self.cut == "whole" else replace(raw, row_groups=(self.start, self.end))

    def counted(self) -> InputPart:
        """The part with the number of its first line, which takes a pass over what is before it."""
        if self.cut != "lines" or not self.start:
            return self
        return replace(
            self,
            first_line=1 + FileSection(Path(self.path), self.start, self.end).count_lines_before(),
        )


def cut_files(
    files: Sequence[Path], split: TextSplit, task_bytes: int, *, whole_files: bool = False
) -> list[list[InputPart]]:
    """The parts of each task, in order."""
    tasks: list[list[InputPart]] = []
    pending: list[InputPart] = []
    size = 0
    for path in files:
        found = path.stat()
        file = InputPart(str(path), str(path.absolute()), found.st_size, found.st_mtime_ns)
        parts = [] if whole_files or found.st_size <= task_bytes else _cut(file, split, task_bytes)
        if parts:
            tasks += [pending] if pending else []
            tasks += [[part] for part in parts]
            pending, size = [], 0
            continue
        pending.append(file)
        size += found.st_size
        if size >= task_bytes:
            tasks.append(pending)
            pending, size = [], 0
    return [*tasks, pending] if pending else tasks


def _cut(file: InputPart, split: TextSplit, task_bytes: int) -> list[InputPart]:
    """The parts of a large file; none where it can only be read as a whole."""
    raw = RawFile.at(Path(file.path))
    kind = FORMATS.get(raw.suffix)
    with open(file.path, "rb") as stream:
        if compression_of(stream.read(6)) is not None:
            return []
    if kind == "jsonl" or (kind == "txt" and split == "line"):
        ends = [
            min(start + task_bytes, file.file_bytes)
            for start in range(0, file.file_bytes, task_bytes)
        ]
        return [
            replace(file, cut="lines", start=start, end=end) for start, end in pairwise([0, *ends])
        ]
    return _cut_rows(file, task_bytes) if kind == "parquet" and is_installed("pyarrow") else []


def _cut_rows(file: InputPart, task_bytes: int) -> list[InputPart]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(file.path)
        sizes = [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError):  # the task that reads it reports what is wrong
        return []
    bounds, size = [0], 0
    for group, group_bytes in enumerate(sizes, 1):
        size += group_bytes
        if size >= task_bytes or group == len(sizes):
            bounds.append(group)
            size = 0
    return [replace(file, cut="rows", start=start, end=end) for start, end in pairwise(bounds)]


def part_size(part: InputPart, parts: Sequence[InputPart]) -> int:
    """The bytes of a part for the progress line; row groups share those of their file."""
    return (
        part.size
        if part.cut != "rows"
        else part.file_bytes // max(1, sum(one.path == part.path for one in parts))
    )


def parts_of(arguments: Mapping[str, Any]) -> list[InputPart]:
    """The parts in a task's arguments."""
    return [InputPart(**part) for part in arguments["parts"]]


def as_arguments(parts: Sequence[InputPart]) -> list[dict[str, Any]]:
    """Parts as a task's arguments."""
    return [asdict(part) for part in parts]


def with_lines(parts: Sequence[InputPart], work: Callable[[Sequence[InputPart]], T]) -> T:
    """Call `work`. If it fails by an error that may name a line, call it again with lines counted, which costs time only then."""
    try:
        return work(parts)
    except DataError:
        if all(part.cut != "lines" or not part.start for part in parts):
            raise
    return work([part.counted() for part in parts])


@dataclass
class PartCount:
    """What a task found in one part: documents, and the lines of a range, from which the numbers of later lines follow."""

    documents: int = 0
    lines: int = 0


def read_parts(
    parts: Sequence[InputPart], read: Callable[[RawFile], Iterator[T]], counts: list[PartCount]
) -> Iterator[tuple[int, T]]:
    """The items of parts, each with the number of its part; a whole file without items is an error. `counts` is filled."""
    for number, part in enumerate(parts):
        raw = part.open()
        count = PartCount()
        counts.append(count)
        items = read(raw)
        for item in not_empty(items, part.name) if part.cut == "whole" else items:
            count.documents += 1
            yield number, item
        count.lines = 0 if raw.section is None else raw.section.newlines


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
        for part, (found, _) in zip(parts, result["counts"], strict=True):
            documents[part.name] = documents.get(part.name, 0) + found
    for name, found in documents.items():
        if not found:
            raise no_documents(name)


def first_lines(
    tasks: Sequence[Sequence[InputPart]], results: Sequence[Mapping[str, Any]]
) -> list[list[int]]:
    """For each part of each task, how much to add to its line numbers: ranges count from 2, because nobody knew what is before them."""
    known: list[list[int]] = []
    seen: dict[str, int] = {}
    for parts, result in zip(tasks, results, strict=True):
        known.append([])
        for part, (_, lines) in zip(parts, result["counts"], strict=True):
            before = seen.get(part.path, 0) if part.start else 0
            known[-1].append(before - 1 if part.cut == "lines" and part.start else 0)
            seen[part.path] = before + lines if part.cut == "lines" else 0
    return known

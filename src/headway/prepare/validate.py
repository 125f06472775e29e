"""Checks raw data record by record (`headway data validate`). In: files and their kind; out: every
bad record.

Lengths are counted in tokens if a tokenizer is given, else in characters. A file that cannot be
read further (truncated JSON, damaged compression) is one bad record where reading ended. A .jsonl
file is read line by line, so one bad line hides no other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from headway.errors import ConfigError, DataError
from headway.records.base import (
    RecordFields,
    RecordKind,
    check_tokenized,
    count_unread,
    parse_record,
    record_kind,
    validated_kinds,
)
from headway.runtime.progress import progress
from headway.text.document import Record, TextOf, place_of
from headway.text.formats import FORMATS
from headway.text.formats.json import parse_object
from headway.text.raw import RawFile, decode
from headway.text.read import Document, expand, read_documents, read_records
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import (
    ChatTemplate,
    default_template,
    encode_segments,
    find_template,
)
from headway.tokenizer.chat_template import BUILT_IN
from headway.tokenizer.load import Tokenizer

BATCH_RECORDS = 256
"""Records that a tokenizer gets at once."""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be used, and the reason."""

    file: str
    line: int | None
    message: str
    record: int | None = None
    """In a JSON list: the entry, counted from 1."""

    @property
    def place(self) -> str:
        """`file:line`, with the number of the entry in a list."""
        return place_of(self.file, self.line, self.record)


@dataclass(frozen=True)
class HistogramBin:
    """The number of records with a length from `low` to `high`."""

    low: int
    high: int
    records: int


@dataclass
class ValidationReport:
    """Counts of good records, all bad records, lengths and unread keys."""

    kind: str
    unit: Literal["tokens", "characters"]
    files: int = 0
    good: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    total: int = 0
    """Sum of the lengths of all good records."""
    longest: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    """Bits of the length -> number of good records."""
    unread: Counter[str] = field(default_factory=Counter)
    """Unread keys of good records -> number of records."""

    @property
    def records(self) -> int:
        """Good and bad records."""
        return self.good + len(self.bad)

    def histogram(self) -> list[HistogramBin]:
        """Lengths by powers of two, from the shortest to the longest."""
        if not self.sizes:
            return []
        bins: list[HistogramBin] = []
        for bits in range(min(self.sizes), max(self.sizes) + 1):
            low = 1 << (bits - 1) if bits else 0
            high = (1 << bits) - 1
            bins.append(HistogramBin(low, high, self.sizes[bits]))
        return bins

    def count(self, length: int) -> None:
        """Add a good record."""
        self.good += 1
        self.total += length
        self.longest = max(self.longest, length)
        self.sizes[length.bit_length()] += 1


@dataclass(frozen=True)
class ValidateOptions:
    """The kind that records must have, and how their lengths are counted."""

    kind: str
    tokenizer: Tokenizer | None = None
    template: str | None = None
    """The chat template; None: the tokenizer's own, else chatml; without a tokenizer no template is
    applied."""
    keys: KeyMap = KeyMap()
    text: TextOf = field(default_factory=TextOf)


def validate(paths: Sequence[Path | str], options: ValidateOptions) -> ValidationReport:
    """Read all records. Bad records are in the report and raise nothing."""
    if options.kind in validated_kinds():
        kind = record_kind(options.kind)
    else:
        kind = check_tokenized(options.kind)
    report = ValidationReport(options.kind, "characters" if options.tokenizer is None else "tokens")
    measure = _measure(options, kind)
    files = expand(list(paths))
    total = sum(file.stat().st_size for file in files)
    with progress("validate", total=total, unit="bytes") as advance:
        for file in files:
            report.files += 1
            parsed = _parsed(file, kind, RecordFields(options.keys, options.text))
            while batch := list(islice(parsed, BATCH_RECORDS)):
                report.bad += [entry for entry in batch if isinstance(entry, BadRecord)]
                records = [entry for entry in batch if not isinstance(entry, BadRecord)]
                # A record of the right shape may still be refused by the chat template.
                for record, length in zip(records, measure(records), strict=True):
                    if isinstance(length, BadRecord):
                        report.bad.append(length)
                        continue
                    report.count(length)
                    count_unread(record.example.unread, report.unread)
            advance(file.stat().st_size)
    return report


@dataclass(frozen=True)
class ParsedRecord:
    """A record that has the right shape."""

    place: Record | Document
    example: Any


def _parsed(
    file: Path, kind: RecordKind, fields: RecordFields
) -> Iterator[ParsedRecord | BadRecord]:
    for entry in _entries(file, kind):
        if isinstance(entry, BadRecord):
            yield entry
            continue
        try:
            yield ParsedRecord(entry, parse_record(kind, entry, fields))
        except DataError as error:
            yield _bad(entry, error)


def _entries(file: Path, kind: RecordKind) -> Iterator[Record | Document | BadRecord]:
    # In .jsonl a bad line hides no other; files of other formats end at their first damage.
    raw = RawFile.at(file)
    format_name = FORMATS.get(raw.suffix)
    if format_name == "jsonl":
        yield from read_lines(raw)
        return
    try:
        if format_name == "txt" and kind.is_text:
            yield from read_documents([file])
        else:
            yield from read_records([file])
    except DataError as error:
        yield ended_at(str(file), error)


def read_lines(raw: RawFile) -> Iterator[Record | BadRecord]:
    """The objects of a .jsonl file; a bad line hides no other."""
    number = 0
    try:
        with raw.open() as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    data = parse_object(decode(line, raw.name, number), raw.name, number)
                    yield Record(data, raw.name, number)
                except DataError as error:
                    yield BadRecord(raw.name, number, _without(str(error), f"{raw.name}:{number}"))
    except DataError as error:
        yield BadRecord(raw.name, number or None, _without(str(error), raw.name))
    # An empty file is most likely a mistake, so it is no file without bad records.
    if number == 0:
        yield BadRecord(raw.name, None, "no records; the file is empty.")


def ended_at(file: str, error: DataError) -> BadRecord:
    """The error that ended a file, with the line and record that its message names."""
    message = str(error).removeprefix(file)
    # Readers begin their messages with `file:line (record n): `.
    matched = re.match(r":(\d+)(?: \(record (\d+)\))?: ", message)
    if matched is None:
        return BadRecord(file, None, _without(str(error), file))
    record = int(matched[2]) if matched[2] else None
    return BadRecord(file, int(matched[1]), message[matched.end() :], record)


def _bad(entry: Record | Document, error: DataError) -> BadRecord:
    number = entry.number if isinstance(entry, Record) else None
    return BadRecord(entry.source, entry.line, _without(str(error), entry.place), number)


def _without(message: str, place: str) -> str:
    return message.removeprefix(f"{place}: ")


def _measure(
    options: ValidateOptions, kind: RecordKind
) -> Callable[[list[ParsedRecord]], Iterator[int | BadRecord]]:
    """A function that measures records, in tokens or in characters."""
    tokenizer = options.tokenizer
    if tokenizer is None and (kind.is_text or options.template is None):
        return lambda batch: (_characters(kind, record.example) for record in batch)
    if tokenizer is not None and kind.is_text:
        return lambda batch: (
            len(ids) for ids in tokenizer.encode_batch([record.example.text for record in batch])
        )
    if tokenizer is not None:
        template = find_template(options.template or default_template(tokenizer), tokenizer)
        return lambda batch: _rendered(batch, kind, template, tokenizer)
    # A template alone can refuse a record; only built-in ones need no tokenizer.
    if options.template not in BUILT_IN:
        raise ConfigError(
            f"--template {options.template} needs a tokenizer with its special tokens. Give "
            "--tokenizer."
        )
    return lambda batch: _written(batch, kind, BUILT_IN[str(options.template)])


def _rendered(
    batch: list[ParsedRecord], kind: RecordKind, template: ChatTemplate, tokenizer: Tokenizer
) -> Iterator[int | BadRecord]:
    """Lengths in tokens of records that the template accepts; of a pair, of its longer side."""
    for record in batch:
        try:
            segments = kind.segments(record.example, template)
            lengths: list[int] = []
            for rendered in encode_segments(segments, template.name, tokenizer):
                if isinstance(rendered, DataError):
                    raise rendered
                lengths.append(len(rendered.ids))
            yield max(lengths)
        except DataError as error:
            yield _bad(record.place, error)


def _written(
    batch: list[ParsedRecord], kind: RecordKind, template: ChatTemplate
) -> Iterator[int | BadRecord]:
    """Lengths in characters of records that the template accepts."""
    for record in batch:
        try:
            kind.segments(record.example, template)
            yield _characters(kind, record.example)
        except DataError as error:
            yield _bad(record.place, error)


def _characters(kind: RecordKind, example: Any) -> int:
    """The length of the longest document of an example."""
    return max(sum(len(part.text) for part in document) for document in kind.show(example))

"""Checks raw data record by record (`headway data validate`). In: files and their kind; out: every bad record.

Lengths are counted in tokens if a tokenizer is given, else in characters. A file that cannot be read further (truncated JSON, damaged
compression) is one bad record where reading ended. A .jsonl file is read line by line, so one bad line hides no other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from headway.errors import ConfigError, DataError
from headway.prepare.encode import KINDS, DataKind, count_unread, pair_segments, unpaired_segments
from headway.prepare.parse_chat import (
    Conversation,
    LabelledAnswer,
    PreferencePair,
    parse_conversation,
    parse_preference,
    parse_unpaired,
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
    Segment,
    Turn,
    default_template,
    encode_segments,
    find_template,
)
from headway.tokenizer.chat_template import BUILT_IN
from headway.tokenizer.load import Tokenizer

BATCH_RECORDS = 256
PARSERS = {"chat": parse_conversation, "preference": parse_preference, "unpaired": parse_unpaired}
RecordContent = Conversation | PreferencePair | LabelledAnswer


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

    kind: DataKind
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
        bits = range(min(self.sizes), max(self.sizes) + 1)
        return [HistogramBin(1 << (b - 1) if b else 0, (1 << b) - 1, self.sizes[b]) for b in bits]

    def count(self, length: int) -> None:
        """Add a good record."""
        self.good += 1
        self.total += length
        self.longest = max(self.longest, length)
        self.sizes[length.bit_length()] += 1


@dataclass(frozen=True)
class ValidateOptions:
    """What records must be, and how their lengths are counted."""

    kind: DataKind
    tokenizer: Tokenizer | None = None
    template: str | None = None
    """The chat template; None: the tokenizer's own, else chatml; without a tokenizer no template is applied."""
    keys: KeyMap = KeyMap()
    text: TextOf = field(default_factory=TextOf)


def validate(paths: Sequence[Path | str], options: ValidateOptions) -> ValidationReport:
    """Read all records. Bad records are in the report and raise nothing."""
    if options.kind not in KINDS:
        raise ConfigError(f"--kind is {options.kind!r}; it must be one of {', '.join(KINDS)}.")
    report = ValidationReport(options.kind, "characters" if options.tokenizer is None else "tokens")
    measure = _measure(options)
    files = expand(list(paths))
    with progress(
        "validate", total=sum(file.stat().st_size for file in files), unit="bytes"
    ) as advance:
        for file in files:
            report.files += 1
            parsed = _parsed(file, options)
            while batch := list(islice(parsed, BATCH_RECORDS)):
                report.bad += [one for one in batch if isinstance(one, BadRecord)]
                good = [one for one in batch if not isinstance(one, BadRecord)]
                for one, found in zip(good, measure(good), strict=True):
                    if isinstance(found, BadRecord):
                        report.bad.append(found)
                        continue
                    report.count(found)
                    if not isinstance(one.content, str):
                        count_unread(one.content.unread, report.unread)
            advance(file.stat().st_size)
    return report


@dataclass(frozen=True)
class ParsedRecord:
    """A record that has the right shape."""

    place: Record | Document
    content: str | RecordContent


def _parsed(file: Path, options: ValidateOptions) -> Iterator[ParsedRecord | BadRecord]:
    for one in _entries(file, options.kind):
        if isinstance(one, BadRecord):
            yield one
            continue
        try:
            if isinstance(one, Document):
                content = one.text
            elif options.kind == "text":
                content = options.text(one).text
            else:
                content = PARSERS[options.kind](one, options.keys)
            if isinstance(content, str) and not content.strip():
                raise DataError(f"{one.place}: the text is empty.")
            yield ParsedRecord(one, content)
        except DataError as error:
            yield _bad(one, error)


def _entries(file: Path, kind: DataKind) -> Iterator[Record | Document | BadRecord]:
    raw = RawFile.at(file)
    format_name = FORMATS.get(raw.suffix)
    if format_name == "jsonl":
        yield from read_lines(raw)
        return
    try:
        yield from (
            read_documents([file])
            if format_name == "txt" and kind == "text"
            else read_records([file])
        )
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
                    yield Record(
                        parse_object(decode(line, raw.name, number), raw.name, number),
                        raw.name,
                        number,
                    )
                except DataError as error:
                    yield BadRecord(raw.name, number, _without(str(error), f"{raw.name}:{number}"))
    except DataError as error:
        yield BadRecord(raw.name, number or None, _without(str(error), raw.name))
    if number == 0:
        yield BadRecord(raw.name, None, "no records; the file is empty.")


def ended_at(file: str, error: DataError) -> BadRecord:
    """The error that ended a file, with the line and record that its message names."""
    found = re.match(r":(\d+)(?: \(record (\d+)\))?: ", rest := str(error).removeprefix(file))
    if found is None:
        return BadRecord(file, None, _without(str(error), file))
    return BadRecord(file, int(found[1]), rest[found.end() :], int(found[2]) if found[2] else None)


def _bad(one: Record | Document, error: DataError) -> BadRecord:
    return BadRecord(
        one.source,
        one.line,
        _without(str(error), one.place),
        one.number if isinstance(one, Record) else None,
    )


def _without(message: str, place: str) -> str:
    return message.removeprefix(f"{place}: ")


def _measure(options: ValidateOptions) -> Callable[[list[ParsedRecord]], Iterator[int | BadRecord]]:
    """A function that measures records, in tokens or in characters."""
    tokenizer = options.tokenizer
    if options.kind == "text" or (tokenizer is None and options.template is None):
        if tokenizer is None:
            return lambda batch: (_characters(one.content) for one in batch)
        return lambda batch: (
            len(ids) for ids in tokenizer.encode_batch([str(one.content) for one in batch])
        )
    if tokenizer is not None:
        template = find_template(options.template or default_template(tokenizer), tokenizer)
        return lambda batch: _rendered(batch, template, tokenizer)
    if options.template not in BUILT_IN:
        raise ConfigError(
            f"--template {options.template} needs a tokenizer with its special tokens. Give --tokenizer."
        )
    return lambda batch: _written(batch, BUILT_IN[str(options.template)])


def _rendered(
    batch: list[ParsedRecord], template: ChatTemplate, tokenizer: Tokenizer
) -> Iterator[int | BadRecord]:
    for one in batch:
        try:
            found = encode_segments(_segments(one.content, template), template.name, tokenizer)
            for rendered in found:
                if isinstance(rendered, DataError):
                    raise rendered
            yield max(
                len(rendered.ids) for rendered in found if not isinstance(rendered, DataError)
            )
        except DataError as error:
            yield _bad(one.place, error)


def _written(batch: list[ParsedRecord], template: ChatTemplate) -> Iterator[int | BadRecord]:
    """Lengths in characters of records that the template accepts."""
    for one in batch:
        try:
            _segments(one.content, template)
            yield _characters(one.content)
        except DataError as error:
            yield _bad(one.place, error)


def _segments(content: str | RecordContent, template: ChatTemplate) -> list[list[Segment]]:
    if isinstance(content, PreferencePair):
        return pair_segments(content, template)
    if isinstance(content, LabelledAnswer):
        return unpaired_segments(content, template)
    assert isinstance(content, Conversation)
    return [template.segments(content.turns, content.tools)]


def _characters(content: str | RecordContent) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, Conversation):
        return _num_characters(content.turns)
    if isinstance(content, LabelledAnswer):
        return _num_characters((*content.prompt, *content.answer))
    return _num_characters(content.prompt) + max(
        _num_characters(content.chosen), _num_characters(content.rejected)
    )


def _num_characters(turns: Sequence[Turn]) -> int:
    return sum(len(turn.content) + len(turn.context) for turn in turns)

"""Checks multimodal records (`headway data validate --kind multimodal`). In: files, folders, tars;
out: every bad record and broken file.

Each record is parsed as training would parse it, every picture, sound and video that it names is
decoded whole, and its answer is checked against a schema if one is given. A file that many records
name is decoded once. Nothing is skipped: a record is good or in the report.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from headway.errors import DataError
from headway.media.items import ImageSpec, MediaRef, decode_image, read_samples
from headway.media.records import MediaOptions, parse_media_record
from headway.media.schema import AnswerSchema
from headway.media.sources import read_source, source_files
from headway.media.video import check_video
from headway.prepare.validate import BadRecord, ended_at, read_lines
from headway.records.base import count_unread
from headway.records.multimodal import parse_media
from headway.runtime.machine import usable_cores
from headway.runtime.progress import progress
from headway.text.document import Record
from headway.text.formats import FORMATS
from headway.text.raw import RawFile
from headway.text.record_keys import KeyMap

REMEMBERED = 100_000
"""Files whose result is kept for other records that name them."""
RECORDS_PER_THREAD = 4
"""Records that wait for each thread."""
MOST_THREADS = 8
DECODED_SIZE = ImageSpec(64, 64)
"""Every pixel of a picture is decoded; what is thrown away afterwards may be small."""


@dataclass(frozen=True)
class ValidateMediaOptions:
    """How records are parsed, and the schema that their answers must follow."""

    media: MediaOptions = MediaOptions(video_frames=0)
    """Videos stay whole, so that each is decoded once."""
    keys: KeyMap = KeyMap()
    schema: AnswerSchema | None = None


@dataclass
class MediaReport:
    """Counts of records and media, and everything that is wrong."""

    files: int = 0
    good: int = 0
    bad_records: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    """One entry for each broken file or wrong value; a record may have several."""
    captions: int = 0
    conversations: int = 0
    media: Counter[str] = field(default_factory=Counter)
    """Modality -> media of good records."""
    text_only: int = 0
    """Good records without media."""
    unread: Counter[str] = field(default_factory=Counter)

    @property
    def records(self) -> int:
        """Good and bad ones."""
        return self.good + self.bad_records


@dataclass(frozen=True)
class _Parsed:
    media: tuple[MediaRef, ...]
    is_caption: bool
    unread: tuple[str, ...]
    problems: tuple[str, ...]


def validate_media(
    paths: Sequence[Path | str], options: ValidateMediaOptions = ValidateMediaOptions()
) -> MediaReport:
    """Read and decode everything. Bad records are in the report and raise nothing."""
    report = MediaReport()
    check = _Checker(options)
    files = source_files(list(paths))
    # Threads, not processes: decoders work outside of Python's lock.
    threads = min(MOST_THREADS, usable_cores())
    with (
        progress("validate", total=len(files), unit="files") as advance,
        ThreadPoolExecutor(threads) as pool,
    ):
        for file in files:
            report.files += 1
            entries = _entries(file, options)
            while batch := list(islice(entries, RECORDS_PER_THREAD * threads)):
                for entry, result in zip(batch, pool.map(check, batch), strict=True):
                    _count(report, entry, result)
            advance(1)
    return report


def _entries(file: Path, options: ValidateMediaOptions) -> Iterator[Record | BadRecord]:
    # In .jsonl a bad line hides no other; files of other formats end at their first damage.
    raw = RawFile.at(file)
    if not file.is_dir() and FORMATS.get(raw.suffix) == "jsonl":
        yield from read_lines(raw)
        return
    try:
        yield from read_source(file, options.media.limits)
    except DataError as error:
        yield ended_at(str(file), error)


class _Checker:
    """Parses a record and decodes its media; remembers the results of files."""

    def __init__(self, options: ValidateMediaOptions) -> None:
        self.options = options
        self._known: OrderedDict[Path, str | None] = OrderedDict()

    def __call__(self, entry: Record | BadRecord) -> _Parsed | list[str]:
        """What a good record holds, or what is wrong with a bad one."""
        if isinstance(entry, BadRecord):
            return [entry.message]
        try:
            parsed = self._parse(entry)
        except DataError as error:
            return [str(error).removeprefix(f"{entry.place}: ")]
        problems = list(parsed.problems)
        for ref in parsed.media:
            problem = self._decode(ref)
            if problem:
                problems.append(problem.removeprefix(f"{entry.place}: "))
        return problems or parsed

    def _parse(self, record: Record) -> _Parsed:
        schema = self.options.schema
        has_rule = schema is not None and schema.records is not None
        # A schema's rule about records names their usual keys, so it cannot judge renamed ones.
        if schema is not None and not self.options.keys.names:
            missing = schema.record_problems(record.data)
            if missing:
                return _Parsed((), False, (), tuple(missing))

        parsed = parse_media_record(record, self.options.media)
        if not parsed.is_conversation:
            caption_problems: tuple[str, ...] = ()
            if schema is not None and has_rule:
                caption_problems = (
                    f"a caption without a question and an answer, which {schema.name} needs.",
                )
            return _Parsed(parsed.media, True, (), caption_problems)

        conversation = parse_media(parsed, self.options.keys)
        problems: list[str] = []
        if schema is not None:
            problems = [f"{problem}." for problem in schema.problems(conversation.answer)]
            if has_rule and not conversation.media:
                problems.append(f"no picture, sound or video, which {schema.name} needs.")
        return _Parsed(conversation.media, False, conversation.conversation.unread, tuple(problems))

    def _decode(self, ref: MediaRef) -> str | None:
        if ref.path is not None and ref.path in self._known:
            return self._known[ref.path]
        # Two threads may decode the same file at once; both get the same result.
        try:
            self._decode_whole(ref)
            problem = None
        except DataError as error:
            problem = str(error)
        if ref.path is not None:
            self._known[ref.path] = problem
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return problem

    def _decode_whole(self, ref: MediaRef) -> None:
        limits = self.options.media.limits
        if ref.modality == "image":
            decode_image(ref, DECODED_SIZE, limits)
        elif ref.modality == "audio":
            read_samples(ref, limits)
        else:
            check_video(ref, limits)


def _count(report: MediaReport, entry: Record | BadRecord, result: _Parsed | list[str]) -> None:
    if isinstance(result, list):
        report.bad_records += 1
        if isinstance(entry, BadRecord):
            report.bad.append(entry)
        else:
            report.bad += [
                BadRecord(entry.source, entry.line, message, entry.number) for message in result
            ]
        return
    report.good += 1
    report.captions += result.is_caption
    report.conversations += not result.is_caption
    report.media.update(ref.modality for ref in result.media)
    report.text_only += not result.media
    count_unread(result.unread, report.unread)

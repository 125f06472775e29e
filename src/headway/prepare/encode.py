"""How the items of raw files become tokens: one reader and one encoder for texts, one reader and
one encoder for records of any kind.

A reader yields items with their sizes; an encoder turns a list of items into `Encoded` and runs in
worker processes.

    text        file or record -> TextPiece -> ids, with the begin and end token
    records     record -> example of its kind (headway/records) -> conversations
                -> documents with ids and loss mask
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headway.errors import DataError
from headway.prepare.workers import Encoded
from headway.records.base import (
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    RecordFields,
    RecordKind,
    count_unread,
    parse_record,
    with_place,
)
from headway.runtime.seed import derive
from headway.store.media_items import MediaItem
from headway.store.source import Ids, Longs
from headway.text.clean import CleanReport, CleanRules, clean
from headway.text.document import Record, TextSplit
from headway.text.read import read_blocks, read_documents, read_records
from headway.tokenizer.chat import ChatTemplate, Rendered, Segment, encode_segments, find_template
from headway.tokenizer.load import Tokenizer, load_tokenizer
from headway.tokenizer.split_points import TextPiece

Side = Literal["train", "valid"]
SIDES: tuple[Side, Side] = ("train", "valid")


@dataclass(frozen=True)
class TextReader:
    """Reads texts, long ones in pieces; cleaning, which judges whole documents, happens here."""

    tokenizer: Tokenizer
    text_key: str
    template: str | None
    split: TextSplit
    clean: CleanRules | None
    cleaned: CleanReport = field(default_factory=CleanReport)

    def __call__(self, files: Sequence[Path]) -> Iterator[tuple[TextPiece, int]]:
        for blocks in self._texts(files):
            # The size decides only where chunks end, so characters will do.
            for piece in self.tokenizer.pieces(blocks):
                yield piece, len(piece.text)

    def _texts(self, files: Sequence[Path]) -> Iterator[Iterator[str]]:
        """Each text as blocks, so that one longer than memory can be read."""
        if self.clean is None:
            texts = read_blocks(
                files, text_key=self.text_key, template=self.template, split=self.split
            )
            return (blocks for _, blocks in texts)
        documents = read_documents(
            files, text_key=self.text_key, template=self.template, split=self.split
        )
        return (iter([document.text]) for document in clean(documents, self.clean, self.cleaned))


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts; a worker process opens the tokenizer once."""

    path: Path
    bos_id: int | None
    eos_id: int | None
    threads: bool
    """Let the tokenizer use all cores; off where worker processes do that."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)

    def encode(self, items: list[TextPiece]) -> Encoded:
        """The ids of some texts. The first and the last item may be parts of longer texts."""
        # Many pieces at once would start as many threads as there are cores in every worker.
        if self.threads:
            encoded = [np.array(ids, np.uint32) for ids in self._tokenizer.encode_pieces(items)]
        else:
            encoded = [self._tokenizer.encode_on_one_core(item) for item in items]

        begin_token = _as_ids(self.bos_id)
        end_token = _as_ids(self.eos_id)
        parts: list[Ids] = []
        lengths: list[int] = []
        empty = 0
        # Tokens of a text whose last piece is not among the items so far.
        open_tokens = 0
        for item, ids in zip(items, encoded, strict=True):
            # A whole text without a token is no document; a part of one may well be empty.
            if item.first and item.last and not len(ids):
                empty += 1
                continue
            if item.first:
                parts.append(begin_token)
                open_tokens += len(begin_token)
            parts.append(ids)
            open_tokens += len(ids)
            if item.last:
                parts.append(end_token)
                lengths.append(open_tokens + len(end_token))
                open_tokens = 0

        # ASCII, the usual case, need not be encoded to know its bytes.
        size = sum(
            len(item.text) if item.text.isascii() else len(item.text.encode()) for item in items
        )
        counts = {"bytes": size, "empty": empty}
        # With an empty array: a chunk may have no text, and numpy joins at least one array.
        flat = np.concatenate([_as_ids(None), *parts])
        return Encoded(flat, np.array(lengths, np.int64), None, counts, open_tokens)


def _as_ids(token: int | None) -> Ids:
    """A special token as ids of a text; none at all if the tokenizer has no such token."""
    if token is None:
        return np.empty(0, np.uint32)
    return np.array([token], np.uint32)


@dataclass(frozen=True)
class Split:
    """Which records are for validation: those whose hash is at most `threshold`. Its repr is part
    of the key of an unfinished build."""

    seed: int
    threshold: int
    side: Side

    def includes(self, record: Record, number: int) -> bool:
        """Whether record `number` of its file belongs to this side."""
        validates = record_hash(self.seed, record, number) <= self.threshold
        return validates == (self.side == "valid")

    @staticmethod
    def sides(files: Sequence[Path], fraction: float, seed: int) -> list[Split]:
        """Both sides: `fraction` of all records, rounded, are for validation, and neither side is
        empty."""
        hashes = np.fromiter(
            (record_hash(seed, record, number) for record, number in numbered_records(files)),
            np.int64,
        )
        return Split.of_hashes(hashes, files, fraction, seed)

    @staticmethod
    def of_hashes(hashes: Longs, files: Sequence[Path], fraction: float, seed: int) -> list[Split]:
        """Both sides, from the hashes of all records."""
        # Each side needs a record.
        if len(hashes) < 2:
            raise DataError(
                f"{files[0]}: {len(hashes)} record cannot be split into training and validation "
                "data."
            )
        # The `count` records with the lowest hashes validate: exactly the fraction, whatever the
        # hashes are.
        count = min(max(1, round(len(hashes) * fraction)), len(hashes) - 1)
        threshold = int(np.partition(hashes, count - 1)[count - 1])
        return [Split(seed, threshold, side) for side in SIDES]


@dataclass(frozen=True)
class RecordReader:
    """Reads the records of one side of the split, or all of them."""

    kind: RecordKind
    split: Split | None

    def __call__(self, files: Sequence[Path]) -> Iterator[tuple[Record, int]]:
        for file in files:
            for number, record in enumerate(self.kind.read([file])):
                if self.split is None or self.split.includes(record, number):
                    yield record, self.kind.size_of(record)


def numbered_records(files: Sequence[Path]) -> Iterator[tuple[Record, int]]:
    """The records of some files, each with its number in its file: the numbers by which
    `RecordReader` splits."""
    for file in files:
        # In its file, not overall: a file that is added leaves the hashes of all other records as
        # they are.
        for number, record in enumerate(read_records([file])):
            yield record, number


def record_hash(seed: int, record: Record, number: int) -> int:
    """A random number that depends on the seed, the file's name and the record's number in it
    alone."""
    # The name without its folder: a copy of the data is split the same way.
    return derive(seed, "valid", Path(record.source).name, number)


@dataclass(frozen=True)
class RecordEncoder:
    """Encodes the records of one kind with a chat template; a worker process opens the tokenizer
    once."""

    tokenizer: Path
    template: str
    kind: RecordKind
    settings: DocumentSettings
    threads: bool
    """Let the tokenizer use all cores; off where worker processes do that."""

    @cached_property
    def _loaded(self) -> tuple[Tokenizer, ChatTemplate]:
        tokenizer = load_tokenizer(self.tokenizer)
        return tokenizer, find_template(self.template, tokenizer)

    def encode(self, items: list[Record]) -> Encoded:
        """The documents of some records, all their texts encoded together."""
        tokenizer, template = self._loaded
        counts: Counter[str] = Counter(records=len(items))
        fields = RecordFields(self.settings.keys, positions=self.settings.positions)
        planned: list[tuple[Record, Any, list[list[Segment]]]] = []
        for record in items:
            with self._bad_records(record, counts):
                example = parse_record(self.kind, record, fields)
                count_unread(example.unread, counts)
                planned.append((record, example, self.kind.segments(example, template)))

        # One call for all texts of the chunk: the tokenizer is fastest with many at once.
        flat = [segments for _, _, conversations in planned for segments in conversations]
        rendered = iter(encode_segments(flat, template.name, tokenizer, self.threads))

        encoder = self.kind.encoder(self.settings)
        context = EncodeContext(tokenizer, template, counts)
        documents: list[EncodedDocument] = []
        for record, example, conversations in planned:
            # All results of the record are taken before one may raise: the next record's follow.
            results = [next(rendered) for _ in conversations]
            with self._bad_records(record, counts):
                checked = [_checked(result) for result in results]
                documents += encoder.documents(example, checked, context)

        ids = np.concatenate([np.zeros(0, np.uint32), *(document.ids for document in documents)])
        mask = np.concatenate([np.zeros(0, np.bool_), *(document.mask for document in documents)])
        lengths = np.array([len(document.ids) for document in documents], np.int64)
        types = None
        if self.kind.is_typed:
            types = [document.type for document in documents]
        counts.update(
            Counter(types or ()),
            documents=len(documents),
            tokens=len(ids),
            targets=int(mask.sum()),
        )
        media: list[tuple[MediaItem, ...]] = []
        if self.kind.holds_media:
            media = [document.items for document in documents]
        return Encoded(ids.astype(np.uint32), lengths, mask, counts, types=types, items=media)

    @contextmanager
    def _bad_records(self, record: Record, counts: Counter[str]) -> Iterator[None]:
        """Count a bad record with `drop_bad`; else raise its error with the place and the
        remedy."""
        try:
            yield
        except DataError as error:
            # Errors of other types are ours, not the record's, and end the build in any case.
            if not self.settings.drop_bad:
                raise DataError(f"{with_place(record, error)} {self.kind.remedy}") from None
            counts["bad"] += 1


def _checked(rendered: Rendered | DataError) -> Rendered:
    if isinstance(rendered, DataError):
        raise rendered
    return rendered

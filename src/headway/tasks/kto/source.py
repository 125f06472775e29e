"""Labelled answers as the loader reads them, each with its mismatch: its prompt followed by the answer of another record.

    store        x0 y0 | x1 y1 | x2 y2 | ...       one document per record; its type is its label (a store of pairs: even good, odd bad)
    matched      x1 y1                             what is trained on
    mismatch     x1 y0                             what KTO estimates the divergence from the reference with
    a row        x2 y2 .. x1 y1 . padding          and next to it, in the same places, x2 y1 . x1 y0 ..

The answer of a mismatch is that of the nearest earlier record with another prompt, going around at the start (of pairs: the same side of
an earlier pair). It depends on the store alone, so ranks, microbatches, packing and interruptions do not change it, and a reference's
log-probabilities of it can be stored. A record is as long as the longer of the two; the shorter one is filled up with tokens
without loss, which no earlier token sees. Invariant: a row holds whole records; a longer one is left out (`Selection.max_length`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from headway.data.batch import Batch
from headway.data.groups import Columns, StoreGroups, marks_of
from headway.errors import ConfigError, DataError
from headway.records.unpaired import BAD, GOOD, UNPAIRED_MARK
from headway.store.reader import Store, ranges
from headway.store.source import Flags, Ids, Longs, TokenSource
from headway.tasks.preference.source import is_preference

if TYPE_CHECKING:
    from headway.data.config import DataConfig
    from headway.data.rows import RowLayout, RowPieces

RECORD = "record"
"""The batch column with the record numbers of each row: [rows, documents of a row], -1 for empty slots."""
LABEL = "label"
"""The batch column with 1 for a good answer, 0 for a bad one and -1 for an empty slot: [rows, documents of a row]."""
MISMATCH_TOKENS, MISMATCH_TARGETS, MISMATCH_WEIGHT = (
    "mismatch.tokens",
    "mismatch.targets",
    "mismatch.loss_weight",
)
BLOCK_RECORDS = 1024
CACHED_BLOCKS = 64
MOST_SAME = 256
"""How many records with the same prompt are passed over."""
MIN_ROW_TOKENS = 8
"""The shortest row that holds a prompt and an answer."""


class PromptFacts(NamedTuple):
    """Of the records of a block: tokens, tokens of the prompt, and a checksum of the prompt."""

    length: list[int]
    prompt: list[int]
    checksum: list[int]


class Mismatches:
    """Where the prompts of a store end, and which record's answer follows which prompt in a mismatch."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stride = 2 if is_preference(store) else 1
        self._block = lru_cache(maxsize=CACHED_BLOCKS)(self._read_block)

    def length(self, record: int) -> int:
        """Tokens of a record."""
        return self._block(record // BLOCK_RECORDS).length[record % BLOCK_RECORDS]

    def prompt(self, record: int) -> int:
        """Tokens of its prompt, the header of the answer included."""
        return self._block(record // BLOCK_RECORDS).prompt[record % BLOCK_RECORDS]

    def partner(self, record: int) -> int:
        """The record whose answer follows this one's prompt."""
        own, found = self._checksum(record), record
        for _ in range(min(MOST_SAME, self.store.num_documents)):
            found = (found - self.stride) % self.store.num_documents
            if self._checksum(found) != own:
                break
        return found

    def _checksum(self, record: int) -> int:
        return self._block(record // BLOCK_RECORDS).checksum[record % BLOCK_RECORDS]

    def _read_block(self, block: int) -> PromptFacts:
        first = block * BLOCK_RECORDS
        lengths = self.store.lengths(first, min(first + BLOCK_RECORDS, self.store.num_documents))
        if not lengths.all():
            raise DataError(
                f"{self.store.name}: document {first + int(np.argmin(lengths))} is empty. Build the store again."
            )
        numbers = np.arange(first, first + len(lengths))
        ids, mask = self.store.gather(numbers, np.zeros_like(numbers), lengths)
        assert mask is not None
        starts = np.cumsum(lengths) - lengths
        # the first target of each document, or its end
        places = np.where(
            mask, ranges(np.zeros_like(lengths), lengths), np.repeat(lengths, lengths)
        )
        prompts = np.minimum.reduceat(places, starts)
        sums = [
            zlib.crc32(np.ascontiguousarray(ids[a : a + n]).tobytes())
            for a, n in zip(starts.tolist(), prompts.tolist(), strict=True)
        ]
        return PromptFacts(lengths.tolist(), prompts.tolist(), sums)


class UnpairedSource(StoreGroups):
    """A store of labelled answers or of pairs, each answer one document; `mismatches` has the same documents with other answers."""

    unit: ClassVar[str] = "record"
    total: ClassVar[str | None] = "records"

    def __init__(
        self,
        store: Store,
        max_length: int,
        first_number: int = 0,
        facts: Mismatches | None = None,
        matched: bool = True,
    ) -> None:
        super().__init__(store, first_number)
        self.max_length = max_length
        self.facts = facts or Mismatches(store)
        self.matched = matched
        _check(store)

    @cached_property
    def mismatches(self) -> UnpairedSource:
        """The same prompts followed by answers of other records."""
        return UnpairedSource(
            self.store, self.max_length, self.first_number, self.facts, matched=False
        )

    @cached_property
    def masked(self) -> bool:
        return True

    @cached_property
    def content_key(self) -> str:
        """Differs from the store's own; the longest mismatch depends on `max_length`."""
        return f"unpaired-{self.max_length}-{self.labels_key}-{self.store.content_key}"

    @property
    def labels_key(self) -> str:
        """Which number of a type means which label; the files of the store hold numbers."""
        return "pairs" if self.store.manifest.types is None else "-".join(self.store.manifest.types)

    @property
    def content_suffix(self) -> str:
        """The labels: the same files with other names of types are other records."""
        return f"-{self.labels_key}"

    def groups_of(self, documents: range) -> range | None:
        """Not known: the length of a record depends on the tokens of another one."""
        return None

    def describe(self) -> str:
        """How many answers are good and bad."""
        good = self.count_good()
        return f"; {good} are desirable, {self.num_documents - good} undesirable"

    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        """Rows without a record."""
        tokens = (num_rows, layout.seq_len)
        places = (num_rows, layout.max_documents)
        return {
            MISMATCH_TOKENS: np.zeros(tokens, np.int64),
            MISMATCH_TARGETS: np.zeros(tokens, np.int64),
            MISMATCH_WEIGHT: np.zeros(tokens, np.float32),
            RECORD: np.full(places, -1, np.int64),
            LABEL: np.full(places, -1, np.int64),
        }

    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        """The mismatches in the places of the records, and the numbers and labels of each row's records."""
        from headway.data.rows import read_pieces

        read_pieces(
            self.mismatches,
            pieces,
            columns[MISMATCH_TOKENS],
            columns[MISMATCH_TARGETS],
            columns[MISMATCH_WEIGHT],
        )
        place = pieces.place_in_row()
        columns[RECORD][pieces.rows, place] = pieces.document + self.first_number
        columns[LABEL][pieces.rows, place] = self.is_good(pieces.document.tolist())

    def lengths(self, first: int, last: int) -> Longs:
        """Tokens of records first to last - 1, or of their mismatches where those are longer."""
        return np.array(
            [max(self.facts.length(one), self._mismatch_length(one)) for one in range(first, last)],
            np.int64,
        )

    def first_at(self, token: int) -> int:
        """The first record that starts at token offset `token` of the store or later."""
        return self.store.first_at(token)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one record from `start` to `stop` - 1, filled up."""
        return self.gather(np.array([document]), np.array([start]), np.array([stop - start]))[0]

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets."""
        return self.gather(np.array([document]), np.array([start]), np.array([stop - start]))[1]

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids and loss mask of many records; what lies behind the end of one is 0 without loss."""
        pieces: list[tuple[int, int, int, int]] = []
        to = 0
        for document, start, length in zip(
            documents.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            at = 0
            for number, first, size in self._pieces(document):
                low, high = max(start, at), min(start + length, at + size)
                if low < high:
                    pieces.append((number, first + low - at, high - low, to + low - start))
                at += size
            to += length
        ids, mask = np.zeros(to, self.store.dtype), np.zeros(to, np.bool_)
        if pieces:
            number, first, size, place = np.array(pieces, np.int64).T
            into = ranges(place, size)
            ids[into], mask[into] = self.store.gather(number, first, size)
        return ids, mask

    def is_good(self, documents: Iterable[int]) -> list[bool]:
        """The labels of some records."""
        if self.store.manifest.types is None:
            return [document % 2 == 0 for document in documents]
        return [self.store.type_of(document) == GOOD for document in documents]

    def count_good(self) -> int:
        """Records with a good answer."""
        return (
            self.num_documents // 2
            if self.store.manifest.types is None
            else self.store.count_types().get(GOOD, (0, 0))[0]
        )

    def _pieces(self, document: int) -> list[tuple[int, int, int]]:
        """What a record is made of: (document of the store, start, tokens). Prompts carry no loss there."""
        if self.matched:
            return [(document, 0, self.facts.length(document))]
        partner, prompt = self.facts.partner(document), self.facts.prompt(document)
        return [
            (document, 0, prompt),
            (partner, self.facts.prompt(partner), self._mismatch_length(document) - prompt),
        ]

    def _mismatch_length(self, document: int) -> int:
        """A mismatch that is too long loses the end of its answer."""
        partner, prompt = self.facts.partner(document), self.facts.prompt(document)
        answer = self.facts.length(partner) - self.facts.prompt(partner)
        return prompt + min(answer, max(1, self.max_length - prompt))


def is_unpaired(store: Store) -> bool:
    """Whether a store holds labelled answers."""
    return UNPAIRED_MARK in marks_of(store)


class UnpairedReader:
    """Reads every source as labelled answers, numbered over all sources; a pair counts as one good and one bad answer."""

    splits_types = False

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._num_records = 0

    def check(self, config: DataConfig) -> None:
        """Raise a ConfigError if the settings do not keep labelled answers whole."""
        if config.train is None:
            raise ConfigError(
                "data.train is null (generated data), but objective kto needs labelled answers. Set sources with kind: unpaired."
            )
        if config.packing not in ("best_fit", "pad"):
            raise ConfigError(
                f"data.packing is {config.packing}, which splits records. Use best_fit or pad with objective kto."
            )
        if config.seq_len < MIN_ROW_TOKENS:
            raise ConfigError(
                f"data.seq_len is {config.seq_len}; a row must hold a prompt and an answer. Use {MIN_ROW_TOKENS} or more."
            )

    def read(self, source: TokenSource) -> TokenSource:
        """The labelled answers of a store."""
        if not isinstance(source, Store) or not (is_unpaired(source) or is_preference(source)):
            raise ConfigError(
                f"data: {source.name} holds no labelled answers, which objective kto needs. Raw files: set kind: unpaired (prompt, "
                "completion, label) or kind: preference. Stores: make them with `headway data tokenize --kind unpaired`."
            )
        records = UnpairedSource(source, self.max_length, self._num_records)
        self._num_records += records.num_documents
        return records


def mismatched(batch: Batch) -> Batch:
    """The mismatches of a microbatch, in the places of its records."""
    extra = batch.extra
    return replace(
        batch,
        tokens=extra[MISMATCH_TOKENS],
        targets=extra[MISMATCH_TARGETS],
        loss_weight=extra[MISMATCH_WEIGHT],
    )


def _check(store: Store) -> None:
    if not is_unpaired(store) and not is_preference(store):
        raise DataError(
            f"{store.name}: holds no labelled answers. Make them with `headway data tokenize --kind unpaired`."
        )
    types = store.manifest.types
    if is_unpaired(store) and (types is None or not {GOOD, BAD}.issuperset(types)):
        raise DataError(f"{store.name}: its documents have no labels. Build the store again.")
    if store.num_documents < 2 * (2 if is_preference(store) else 1):
        raise DataError(
            f"{store.name}: holds one record; an answer is compared with that of another one. Give two or more."
        )

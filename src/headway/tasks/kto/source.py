"""Labelled answers as the loader reads them, each with its KL completion: its prompt followed by
the answer of another record.

    store            x0 y0 | x1 y1 | x2 y2 | ...    one document per record; its type is its label
                                                    (a store of pairs: even good, odd bad)
    completion       x1 y1                          what is trained on
    KL completion    x1 y0                          what KTO estimates the divergence from the
                                                    reference with (TRL's KL_completion)
    a row            x2 y2 .. x1 y1 . padding       and next to it, in the same places,
                                                    x2 y1 . x1 y0 ..

The answer of a KL completion is that of the nearest earlier record with another prompt, going
around at the start (of pairs: the same side of an earlier pair). It depends on the store alone, so
ranks, microbatches, packing and interruptions do not change it, and a reference's log-probabilities
of it can be stored. A record is as long as the longer of the two; the shorter one is filled up with
tokens without loss, which no earlier token sees. Invariant: a row holds whole records; a longer one
is left out (`Selection.max_length`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from headway.data.batch import Batch
from headway.data.groups import Columns, StoreGroups, is_preference, marks_of
from headway.errors import ConfigError, DataError
from headway.records.base import UNPAIRED_MARK
from headway.records.unpaired import BAD, GOOD
from headway.store.reader import Store, ranges
from headway.store.source import Flags, Ids, Longs, TokenSource

if TYPE_CHECKING:
    from headway.data.config import DataConfig
    from headway.data.rows import RowLayout, RowPieces

RECORD = "record"
"""The batch column with the record numbers of each row: [rows, documents of a row], -1 for empty
slots."""
LABEL = "label"
"""The batch column with 1 for a good answer, 0 for a bad one and -1 for an empty slot: [rows,
documents of a row]."""
KL_TOKENS = "mismatch.tokens"
KL_TARGETS = "mismatch.targets"
KL_WEIGHT = "mismatch.loss_weight"
"""The batch columns with the rows of KL completions, each shaped like the batch's own column of
that name."""
BLOCK_RECORDS = 1024
CACHED_BLOCKS = 64
"""Facts about records are read a block at a time; so many blocks are kept, which bounds memory over
a large store."""
MOST_SAME = 256
"""How many records with the same prompt are passed over."""
MIN_ROW_TOKENS = 8
"""The shortest row that holds a prompt and an answer."""


class PromptFacts(NamedTuple):
    """Three numbers of every record of a block: its tokens, its prompt's tokens, and a checksum of
    the prompt."""

    length: list[int]
    prompt: list[int]
    checksum: list[int]


class KLPartners:
    """Where the prompts of a store end, and which record's answer follows which prompt in a KL
    completion."""

    def __init__(self, store: Store) -> None:
        self.store = store
        # of pairs, the answer comes from the same side of another pair: good answers meet good ones
        self.stride = 2 if is_preference(store) else 1
        # A cache of this object, not of the class: it goes with the store.
        self._block = lru_cache(maxsize=CACHED_BLOCKS)(self._read_block)

    def length(self, record: int) -> int:
        """Tokens of a record, its prompt and its answer."""
        return self._block(record // BLOCK_RECORDS).length[record % BLOCK_RECORDS]

    def prompt(self, record: int) -> int:
        """Tokens of its prompt, the header of the answer included."""
        return self._block(record // BLOCK_RECORDS).prompt[record % BLOCK_RECORDS]

    def partner(self, record: int) -> int:
        """The record whose answer follows this one's prompt."""
        # A KL completion needs an answer to another prompt, and records of one prompt often stand
        # together. After MOST_SAME of them the last one is taken all the same, to bound the work.
        prompt = self._checksum(record)
        candidate = record
        for _ in range(min(MOST_SAME, self.store.num_documents)):
            candidate = (candidate - self.stride) % self.store.num_documents
            if self._checksum(candidate) != prompt:
                break
        return candidate

    def _checksum(self, record: int) -> int:
        return self._block(record // BLOCK_RECORDS).checksum[record % BLOCK_RECORDS]

    def _read_block(self, block: int) -> PromptFacts:
        """Read the tokens of BLOCK_RECORDS records; only three numbers of each are kept."""
        first = block * BLOCK_RECORDS
        lengths = self.store.lengths(first, min(first + BLOCK_RECORDS, self.store.num_documents))
        # reduceat below needs at least one token for every document.
        if not lengths.all():
            raise DataError(
                f"{self.store.name}: document {first + int(np.argmin(lengths))} is empty. Build "
                "the store again."
            )
        numbers = np.arange(first, first + len(lengths))
        ids, mask = self.store.gather(numbers, np.zeros_like(numbers), lengths)
        assert mask is not None
        starts = np.cumsum(lengths) - lengths

        # A prompt ends at the first loss target of its document, or with the document. Tokens that
        # are no targets count as its end, so that the smallest place is the one wanted.
        places = np.where(
            mask, ranges(np.zeros_like(lengths), lengths), np.repeat(lengths, lengths)
        )
        prompts = np.minimum.reduceat(places, starts)
        checksums = [
            zlib.crc32(np.ascontiguousarray(ids[start : start + size]).tobytes())
            for start, size in zip(starts.tolist(), prompts.tolist(), strict=True)
        ]
        return PromptFacts(lengths.tolist(), prompts.tolist(), checksums)


class UnpairedSource(StoreGroups):
    """A store of labelled answers or of pairs, each answer one document; `kl_source` has the same
    documents with other answers."""

    unit: ClassVar[str] = "record"
    total: ClassVar[str | None] = "records"

    def __init__(
        self,
        store: Store,
        max_length: int,
        first_number: int = 0,
        facts: KLPartners | None = None,
        matched: bool = True,
    ) -> None:
        super().__init__(store, first_number)
        self.max_length = max_length
        self.facts = facts or KLPartners(store)
        self.matched = matched
        _check(store)

    @cached_property
    def kl_source(self) -> UnpairedSource:
        """The same prompts followed by answers of other records."""
        return UnpairedSource(
            self.store, self.max_length, self.first_number, self.facts, matched=False
        )

    @cached_property
    def masked(self) -> bool:
        return True

    @cached_property
    def content_key(self) -> str:
        """Differs from the store's own; the longest KL completion depends on `max_length`."""
        return f"unpaired-{self.max_length}-{self.labels_key}-{self.store.content_key}"

    @property
    def labels_key(self) -> str:
        """Which number of a type means which label; the files of the store hold numbers."""
        if self.store.manifest.types is None:
            return "pairs"
        return "-".join(self.store.manifest.types)

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
        """The columns of rows without a record: KL completions [rows, seq_len], numbers and labels
        [rows, documents of a row]."""
        # -1 marks an empty slot, 0 would be a record and a bad answer.
        tokens = (num_rows, layout.seq_len)
        places = (num_rows, layout.max_documents)
        return {
            KL_TOKENS: np.zeros(tokens, np.int64),
            KL_TARGETS: np.zeros(tokens, np.int64),
            KL_WEIGHT: np.zeros(tokens, np.float32),
            RECORD: np.full(places, -1, np.int64),
            LABEL: np.full(places, -1, np.int64),
        }

    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        """The KL completions in the places of the records, and the numbers and labels of each row's
        records."""
        from headway.data.rows import read_pieces

        # `lengths` is the longer of the two, so a KL completion fits where its record stands.
        read_pieces(
            self.kl_source,
            pieces,
            columns[KL_TOKENS],
            columns[KL_TARGETS],
            columns[KL_WEIGHT],
        )
        positions = pieces.place_in_row()
        columns[RECORD][pieces.rows, positions] = pieces.document + self.first_number
        columns[LABEL][pieces.rows, positions] = self.is_good(pieces.document.tolist())

    def lengths(self, first: int, last: int) -> Longs:
        """Tokens of records first to last - 1, or of their KL completions where those are
        longer."""
        longer = [
            max(self.facts.length(record), self._kl_length(record)) for record in range(first, last)
        ]
        return np.array(longer, np.int64)

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
        """The ids and loss mask of many records; what lies behind the end of one is 0 without
        loss."""
        # (document of the store, first token, tokens, place in the result) of every span that is
        # read
        spans: list[tuple[int, int, int, int]] = []
        written = 0
        for document, start, length in zip(
            documents.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            # of each piece of the record, what lies in [start, start + length)
            offset = 0
            for number, first, size in self._pieces(document):
                low = max(start, offset)
                high = min(start + length, offset + size)
                if low < high:
                    spans.append((number, first + low - offset, high - low, written + low - start))
                offset += size
            written += length

        # Everything in one read of the store; what no span covers stays 0 without loss.
        ids = np.zeros(written, self.store.dtype)
        mask = np.zeros(written, np.bool_)
        if spans:
            numbers, firsts, sizes, places = np.array(spans, np.int64).T
            into = ranges(places, sizes)
            ids[into], mask[into] = self.store.gather(numbers, firsts, sizes)
        return ids, mask

    def is_good(self, documents: Iterable[int]) -> list[bool]:
        """Whether the answers of some records are good; of pairs, the even documents are."""
        if self.store.manifest.types is None:
            return [document % 2 == 0 for document in documents]
        return [self.store.type_of(document) == GOOD for document in documents]

    def count_good(self) -> int:
        """Records with a good answer."""
        if self.store.manifest.types is None:
            return self.num_documents // 2
        return self.store.count_types().get(GOOD, (0, 0))[0]

    def _pieces(self, document: int) -> list[tuple[int, int, int]]:
        """What a record is made of: (document of the store, start, tokens). Prompts carry no loss
        there."""
        if self.matched:
            return [(document, 0, self.facts.length(document))]
        partner = self.facts.partner(document)
        prompt = self.facts.prompt(document)
        return [
            (document, 0, prompt),
            (partner, self.facts.prompt(partner), self._kl_length(document) - prompt),
        ]

    def _kl_length(self, document: int) -> int:
        """A KL completion that is too long loses the end of its answer."""
        partner = self.facts.partner(document)
        prompt = self.facts.prompt(document)
        # At least one token of the answer is kept, or there would be nothing to score.
        answer = self.facts.length(partner) - self.facts.prompt(partner)
        return prompt + min(answer, max(1, self.max_length - prompt))


def is_unpaired(store: Store) -> bool:
    """Whether a store holds labelled answers."""
    return UNPAIRED_MARK in marks_of(store)


class UnpairedReader:
    """Reads every source as labelled answers, numbered over all sources; a pair counts as one good
    and one bad answer."""

    splits_types = False

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._num_records = 0

    def check(self, config: DataConfig) -> None:
        """Raise a ConfigError if the settings do not keep labelled answers whole."""
        if config.train is None:
            raise ConfigError(
                "data.train is null (generated data), but objective kto needs labelled answers. "
                "Set sources with kind: unpaired."
            )
        if config.packing not in ("best_fit", "pad"):
            raise ConfigError(
                f"data.packing is {config.packing}, which splits records. Use best_fit or pad "
                "with objective kto."
            )
        if config.seq_len < MIN_ROW_TOKENS:
            raise ConfigError(
                f"data.seq_len is {config.seq_len}; a row must hold a prompt and an answer. Use "
                f"{MIN_ROW_TOKENS} or more."
            )

    def read(self, source: TokenSource) -> TokenSource:
        """The labelled answers of a store."""
        if not isinstance(source, Store) or not (is_unpaired(source) or is_preference(source)):
            raise ConfigError(
                f"data: {source.name} holds no labelled answers, which objective kto needs. Raw "
                "files: set kind: unpaired (prompt, completion, label) or kind: preference. "
                "Stores: make them with `headway data tokenize --kind unpaired`."
            )
        # Numbers run on over all sources: a table of stored log-probabilities is indexed by them.
        records = UnpairedSource(source, self.max_length, self._num_records)
        self._num_records += records.num_documents
        return records


def kl_completions(batch: Batch) -> Batch:
    """The KL completions of a microbatch, in the places of its records."""
    extra = batch.extra
    return replace(
        batch,
        tokens=extra[KL_TOKENS],
        targets=extra[KL_TARGETS],
        loss_weight=extra[KL_WEIGHT],
    )


def _check(store: Store) -> None:
    """Refuse a store without labels, or with nothing to take a KL completion's answer from."""
    if not is_unpaired(store) and not is_preference(store):
        raise DataError(
            f"{store.name}: holds no labelled answers. Make them with `headway data tokenize "
            "--kind unpaired`."
        )
    types = store.manifest.types
    if is_unpaired(store) and (types is None or not {GOOD, BAD}.issuperset(types)):
        raise DataError(f"{store.name}: its documents have no labels. Build the store again.")
    # Of pairs, an answer meets that of another pair: two pairs are four documents.
    if store.num_documents < 2 * (2 if is_preference(store) else 1):
        raise DataError(
            f"{store.name}: holds one record; an answer is compared with that of another one. "
            "Give two or more."
        )

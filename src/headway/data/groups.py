"""Sources whose documents are groups, and the readers that make them. A task that learns from
something else than single documents says here how its records are read: which documents of a store
belong together, which columns a microbatch gets beside tokens, what a step counts.

    store     d0 | d1 | d2 | d3 | ...    documents as they were tokenized
    groups    [d0 d1] | [d2 d3] | ...    one document of a `GroupSource`

Packing, shuffling, splits and limits count groups. Data knows this contract and no task: the
loader, the rows and the checks ask a source, they never recognise it.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from headway.errors import ConfigError, DataError
from headway.records import KINDS
from headway.records.base import PREFERENCE_MARK, record_kind
from headway.store.reader import Store
from headway.store.source import Flags, Ids, Longs, TokenSource

if TYPE_CHECKING:
    from headway.data.config import DataConfig
    from headway.data.rows import RowLayout, RowPieces
    from headway.store.media_table import MediaTable

Columns = dict[str, np.ndarray[Any, Any]]
"""Columns of a microbatch by name; the first dim is its rows."""


class GroupSource(TokenSource):
    """A source each of whose documents is one group."""

    unit: ClassVar[str]
    """What a group is called in messages, in the singular."""
    total: ClassVar[str | None] = None
    """The name under which a step counts its groups (`StepBatch.totals`); None: it counts rows."""
    documents_per_group: ClassVar[int] = 1
    """How many documents of the store are laid out as documents of a row for each group."""
    keeps_whole: ClassVar[bool] = True
    """Whether a group that is longer than a row is left out; otherwise packing may cut it."""

    tables: tuple[MediaTable, ...] = ()
    first_number: int = 0
    """Number of this source's first group; numbers are unique over all sources of a run."""

    @property
    def store(self) -> TokenSource | None:
        """The source that holds the documents of the groups; None: their content is in `tables`."""
        return None

    @property
    def content_suffix(self) -> str:
        """Added to the store's content in checkpoints: what else decides the groups."""
        return ""

    def groups_of(self, documents: range) -> range | None:
        """The groups that are made of some documents of the store; None: any group may be."""
        first = documents.start // self.documents_per_group
        # Rounded up: a group counts if any of its documents is in the range.
        last = -(-documents.stop // self.documents_per_group)
        return range(first, last)

    def require_checked(self) -> None:
        if self.store is not None:
            self.store.require_checked()

    def describe(self) -> str:
        """A note on the groups for the log line about this source's targets; empty: none."""
        return ""

    @abstractmethod
    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        """The columns of a microbatch without a group. Shapes and names are the same for every
        microbatch and source of a task."""

    @abstractmethod
    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        """Write the values of the groups in `pieces`, all of this source, into the columns of a
        microbatch."""


class StoreGroups(GroupSource):
    """Groups of documents of one store."""

    def __init__(self, store: Store, first_number: int = 0) -> None:
        self._store = store
        self.first_number = first_number
        self.name = store.name
        self.fingerprint = store.fingerprint
        self.num_documents = store.num_documents
        self.num_tokens = store.num_tokens

    @property
    def store(self) -> Store:
        """The store whose documents are grouped."""
        return self._store

    @cached_property
    def masked(self) -> bool:
        return self._store.masked

    @cached_property
    def max_id(self) -> int:
        return self._store.max_id


class RecordSource(StoreGroups):
    """A store each of whose documents is a group by itself: a document with columns, which
    subclasses define."""

    unit: ClassVar[str] = "record"
    total: ClassVar[str | None] = "records"

    @cached_property
    def content_key(self) -> str:
        """Differs from the store's own key, under which the store is read as plain documents."""
        return f"{self.total}-{self._store.content_key}"

    def lengths(self, first: int, last: int) -> Longs:
        return self._store.lengths(first, last)

    def first_at(self, token: int) -> int:
        return self._store.first_at(token)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        return self._store.tokens(document, start, stop)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        return self._store.mask(document, start, stop)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        return self._store.gather(documents, starts, lengths)


class SourceReader(Protocol):
    """How the sources of a task are read; made once for all sources of a run, so that groups are
    numbered over all of them."""

    splits_types: bool
    """Whether a store of several types may become one source per type."""

    def check(self, config: DataConfig) -> None:
        """Raise a ConfigError for settings of rows that the task cannot use."""
        ...

    def read(self, source: TokenSource) -> TokenSource:
        """The source as the task reads it; a ConfigError if it holds something else."""
        ...


class DocumentReader:
    """Reads single documents, and refuses stores whose documents mean something only as groups."""

    splits_types = True

    def check(self, config: DataConfig) -> None:
        """Accepts all settings of rows."""

    def read(self, source: TokenSource) -> TokenSource:
        """The source itself; a ConfigError if its documents belong together."""
        kinds = [record_kind(name) for name in KINDS]
        refusals = {kind.mark: kind.refusal for kind in kinds}
        marks = marks_of(source)
        for mark in sorted(marks, reverse=True):
            refusal = refusals.get(mark)
            if refusal is not None:
                raise ConfigError(f"data: {source.name} {refusal}")
        # A kind of the user's: no message of its own, but the same reason.
        unknown = marks - refusals.keys()
        if unknown:
            kind = min(unknown).removeprefix("kind=")
            raise ConfigError(
                f"data: {source.name} holds records of kind {kind}, which a task of its own reads. "
                "Set objective.kind to that task, or give other data."
            )
        return source


def marks_of(source: TokenSource) -> frozenset[str]:
    """What the manifest of a store says its documents are (`kind=...`); empty: text, or no store of
    headway."""
    if not isinstance(source, Store):
        return frozenset()
    # A store's `sources` begin with its mark; text stores list files there instead.
    first_words = (origin.split()[0] for origin in source.manifest.sources if origin.split())
    return frozenset(word for word in first_words if word.startswith("kind="))


def is_preference(store: Store) -> bool:
    """Whether a store holds pairs: documents 2i (chosen) and 2i + 1 (rejected)."""
    return PREFERENCE_MARK in marks_of(store)


def num_pairs(store: Store) -> int:
    """How many pairs a store holds; an error if it does not hold pairs."""
    if not is_preference(store):
        raise DataError(
            f"{store.name}: holds no preference pairs. Make them with `headway data tokenize "
            "--kind preference`."
        )
    if store.num_documents % 2:
        raise DataError(
            f"{store.name}: has {store.num_documents} documents, but pairs need an even number. "
            "Build the store again."
        )
    return store.num_documents // 2


def ungrouped(source: TokenSource) -> TokenSource:
    """The documents that the groups of a source are made of; the source itself where it has no
    groups."""
    if isinstance(source, GroupSource) and source.store is not None:
        return source.store
    return source

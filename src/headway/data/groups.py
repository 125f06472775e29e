"""Sources whose documents are groups, and who makes them. A task that learns from something else than single documents says here how its
records are read: which documents of a store belong together, which columns a microbatch gets beside tokens, what a step counts.

    store     d0 | d1 | d2 | d3 | ...           documents as they were tokenized
    groups    [d0 d1] | [d2 d3] | ...           one document of a `GroupSource`; packing, shuffling, splits and limits count groups

Data knows this contract and no task: the loader, the rows and the checks ask a source, they never recognise it.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from headway.errors import ConfigError
from headway.records.base import CHAT_MARK
from headway.records.preference import PREFERENCE_MARK
from headway.records.unpaired import UNPAIRED_MARK
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
        """Where the documents of the groups are read; None: in `tables`."""
        return None

    @property
    def content_suffix(self) -> str:
        """What decides the content of the groups beside the content of the store."""
        return ""

    def groups_of(self, documents: range) -> range | None:
        """The groups that read some documents of the store; None: others may read them, too."""
        first = documents.start // self.documents_per_group
        last = -(-documents.stop // self.documents_per_group)
        return range(first, last)

    def describe(self) -> str:
        """What a line about the targets of this source adds; empty: nothing."""
        return ""

    @abstractmethod
    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        """The columns of a microbatch without a group. Shapes and names are the same for every microbatch and source of a task."""

    @abstractmethod
    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        """Write what the groups in `pieces`, all of this source, say into the columns of a microbatch."""


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
        """Where the documents are read."""
        return self._store

    @cached_property
    def masked(self) -> bool:
        return self._store.masked

    @cached_property
    def max_id(self) -> int:
        return self._store.max_id


class RecordSource(StoreGroups):
    """A store each of whose documents is a group by itself: a document with columns. Subclasses say which."""

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
    """How the sources of a task are read; made once for all sources of a run, so that groups are numbered over all of them."""

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
        """Any row will do."""

    def read(self, source: TokenSource) -> TokenSource:
        """The source itself."""
        marks = marks_of(source) - {CHAT_MARK}
        for mark, refusal in REFUSALS.items():
            if mark in marks:
                raise ConfigError(f"data: {source.name} {refusal}")
        if marks:
            kind = min(marks).removeprefix("kind=")
            raise ConfigError(
                f"data: {source.name} holds records of kind {kind}, which a task of its own reads. Set objective.kind to that task, or "
                "give other data."
            )
        return source


REFUSALS = {
    UNPAIRED_MARK: "holds answers labelled good or bad, which objective kto reads; others would train on the bad answers, "
    "too. Set objective.kind: kto, or other data.",
    PREFERENCE_MARK: "holds preference pairs; next-token training would train on the rejected answers, too. "
    "Set objective.kind: dpo, or use conversations (kind: chat).",
}
"""By the mark of a store: why its documents are not for a task that reads single documents."""


def marks_of(source: TokenSource) -> frozenset[str]:
    """What the manifest of a store says its documents are (`kind=...`); empty: text, or no store of headway."""
    if not isinstance(source, Store):
        return frozenset()
    first_words = (origin.split()[0] for origin in source.manifest.sources if origin.split())
    return frozenset(word for word in first_words if word.startswith("kind="))


def ungrouped(source: TokenSource) -> TokenSource:
    """The documents that the groups of a source are made of; the source itself where it has no groups."""
    if isinstance(source, GroupSource) and source.store is not None:
        return source.store
    return source

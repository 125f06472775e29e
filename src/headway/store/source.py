"""`TokenSource`: documents of tokens, as the loader reads them from a native store, a foreign store
or generated data.

Documents are numbered from 0 and lie one after another: document i starts at the sum of the lengths
before it. `DocumentRange` and `TokenRange` are views of a part of a source. Invariant: no method
costs memory or time in proportion to the whole source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.errors import DataError

Ids = npt.NDArray[np.unsignedinteger | np.signedinteger]
Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

READ_DOCUMENTS = 4096
"""Documents whose lengths are read together."""


class TokenDocument(NamedTuple):
    """One document: its ids, which of them are loss targets (None: all), its type, and where true
    documents start if it is a pack."""

    ids: Ids
    mask: Flags | None
    type: str
    spans: Longs | None = None


class TokenSource(ABC):
    """Documents of tokens. A reader sets the attributes and overrides the properties; it gets
    `gather` for free or writes a faster one."""

    name: str
    """The name in messages and metrics."""
    num_documents: int
    num_tokens: int
    fingerprint: str | None
    """The tokenizer that made the ids; None if unknown."""

    @cached_property
    def masked(self) -> bool:
        """Whether some tokens are not loss targets."""
        return False

    @cached_property
    def max_id(self) -> int:
        """The highest id that occurs, or may occur; -1 without tokens."""
        raise NotImplementedError

    @cached_property
    def content_key(self) -> str:
        """Changes whenever the content changes; caches are named by it."""
        raise NotImplementedError

    @abstractmethod
    def lengths(self, first: int, last: int) -> Longs:
        """The lengths of documents first to last - 1."""

    @abstractmethod
    def first_at(self, token: int) -> int:
        """The first document that starts at token offset `token` or later; `num_documents` if none
        does."""

    @abstractmethod
    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one document from `start` to `stop` - 1."""

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets; None if the source is not masked."""
        return None

    def span_starts(self, document: int) -> Longs | None:
        """Where the true documents start inside a pack (0 first); None if documents are not
        packs."""
        return None

    def type_of(self, document: int) -> str:
        """The type (folder, domain) of a document; empty if documents have none."""
        return ""

    def count_types(self) -> dict[str, tuple[int, int]]:
        """Documents and tokens of each type; empty if documents have none."""
        return {}

    def token_positions(self, documents: Longs, starts: Longs) -> Longs:
        """Where tokens `starts` of some documents stand in the whole native store: the sum of the
        lengths before them."""
        raise DataError(
            f"{self.name}: only headway stores number their tokens. Make one with `headway data "
            "convert`."
        )

    def require_checked(self) -> None:
        """Wait until all that was read is checked, where large files are checked meanwhile; damage
        is a DataError.

        Call it before a file is completed that was made of what was read: the new file's own
        checksums would hide the damage.
        """
        return

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many pieces of documents, concatenated."""
        pieces = list(
            zip(documents.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
        )
        # An empty array first: numpy cannot concatenate nothing.
        ids = np.concatenate([np.zeros(0, np.uint16), *(self.tokens(*piece) for piece in pieces)])
        if not self.masked:
            return ids, None
        masks = [mask for piece in pieces if (mask := self.mask(*piece)) is not None]
        return ids, np.concatenate([np.zeros(0, np.bool_), *masks])


def iter_documents(source: TokenSource, split_packs: bool = False) -> Iterator[TokenDocument]:
    """All documents of a source; `split_packs` yields the true documents of a pack one by one. At
    the end all that was read is checked."""
    for first in range(0, source.num_documents, READ_DOCUMENTS):
        last = min(first + READ_DOCUMENTS, source.num_documents)
        for number, length in enumerate(source.lengths(first, last).tolist(), first):
            ids = source.tokens(number, 0, length)
            mask = source.mask(number, 0, length)
            type_name = source.type_of(number)
            spans = source.span_starts(number)
            if not split_packs or spans is None:
                yield TokenDocument(ids, mask, type_name, spans)
                continue
            starts = spans.tolist()
            for start, stop in zip(starts, [*starts[1:], length], strict=True):
                part_mask = None
                if mask is not None:
                    part_mask = mask[start:stop]
                yield TokenDocument(ids[start:stop], part_mask, type_name)
    # What is written from these documents gets checksums of its own, so damage must be known by
    # now.
    source.require_checked()


class SourceView(TokenSource):
    """A part of another source."""

    def __init__(self, source: TokenSource, label: str, part_key: str) -> None:
        self.source = source
        self.part_key = part_key
        """Identifies the part within the source."""
        # A label makes the types of one store distinct in reports; a part of a document keeps the
        # name.
        if label:
            self.name = f"{source.name}/{label}"
        else:
            self.name = source.name
        self.fingerprint = source.fingerprint

    @cached_property
    def masked(self) -> bool:
        return self.source.masked

    @cached_property
    def max_id(self) -> int:
        return self.source.max_id

    @cached_property
    def content_key(self) -> str:
        return f"{self.source.content_key}-{self.part_key}"

    def require_checked(self) -> None:
        self.source.require_checked()


class DocumentRange(SourceView):
    """Documents first to last - 1 of a source."""

    def __init__(self, source: TokenSource, first: int, last: int, label: str) -> None:
        super().__init__(source, label, f"{first}-{last}")
        self.first = first
        """The number that its first document has in the source."""
        self._lengths = source.lengths(first, last)
        # `first_at` counts tokens from here.
        self._begin = int(source.lengths(0, first).sum())
        self.num_documents = len(self._lengths)
        self.num_tokens = int(self._lengths.sum())

    def lengths(self, first: int, last: int) -> Longs:
        return self._lengths[first:last]

    def first_at(self, token: int) -> int:
        number = self.source.first_at(self._begin + token) - self.first
        return min(max(0, number), self.num_documents)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        return self.source.tokens(self.first + document, start, stop)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        return self.source.mask(self.first + document, start, stop)

    def span_starts(self, document: int) -> Longs | None:
        return self.source.span_starts(self.first + document)

    def type_of(self, document: int) -> str:
        return self.source.type_of(self.first + document)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        return self.source.gather(documents + self.first, starts, lengths)

    def token_positions(self, documents: Longs, starts: Longs) -> Longs:
        return self.source.token_positions(documents + self.first, starts)


class TokenRange(SourceView):
    """Tokens start to stop - 1 of one document, as a source of one document."""

    def __init__(self, source: TokenSource, document: int, start: int, stop: int) -> None:
        super().__init__(source, "", f"{document}-{start}-{stop}")
        self._document = document
        self._start = start
        self._stop = stop
        self.num_documents = 1
        self.num_tokens = stop - start

    def lengths(self, first: int, last: int) -> Longs:
        return np.array([self.num_tokens], np.int64)[first:last]

    def first_at(self, token: int) -> int:
        # The only document starts at 0.
        return int(token > 0)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        return self.source.tokens(self._document, self._start + start, self._start + stop)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        return self.source.mask(self._document, self._start + start, self._start + stop)

    def span_starts(self, document: int) -> Longs | None:
        """Where the true documents start inside the range; the first may be the rest of one."""
        spans = self.source.span_starts(self._document)
        if spans is None:
            return None
        inside = spans[(spans > self._start) & (spans < self._stop)] - self._start
        return np.concatenate([np.zeros(1, np.int64), inside])

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        return self.source.gather(documents + self._document, starts + self._start, lengths)

    def token_positions(self, documents: Longs, starts: Longs) -> Longs:
        return self.source.token_positions(documents + self._document, starts + self._start)

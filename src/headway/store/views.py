"""A part of a source as a source of its own: consecutive documents, or a stretch of the tokens of one document."""

from __future__ import annotations

import numpy as np

from headway.store.source import Flags, Ids, Longs, Source


class View(Source):
    """What every view has from the source it looks at."""

    def __init__(self, source: Source, label: str, part_key: str) -> None:
        self.source = source
        self.part_key = part_key
        """Which part of the source this is."""
        self._label = label

    @property
    def name(self) -> str:
        """The source's name, and the part's where it has one."""
        return f"{self.source.name}/{self._label}" if self._label else self.source.name

    @property
    def masked(self) -> bool:
        """Whether some tokens are no loss targets."""
        return self.source.masked

    @property
    def max_id(self) -> int:
        """The highest id of the source."""
        return self.source.max_id

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer that made the ids."""
        return self.source.fingerprint

    @property
    def content_key(self) -> str:
        """The source's, and which part."""
        return f"{self.source.content_key}-{self.part_key}"


class DocumentRange(View):
    """Documents first to last - 1 of a source."""

    def __init__(self, source: Source, first: int, last: int, label: str) -> None:
        super().__init__(source, label, f"{first}-{last}")
        self._first = first
        self._lengths = source.lengths(first, last)
        self._begin = int(source.lengths(0, first).sum())

    @property
    def num_documents(self) -> int:
        """Documents of the range."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of the range."""
        return int(self._lengths.sum())

    def lengths(self, first: int, last: int) -> Longs:
        """The lengths of documents first to last - 1."""
        return self._lengths[first:last]

    def first_at(self, token: int) -> int:
        """The first document that starts at token offset `token` or later."""
        return min(max(0, self.source.first_at(self._begin + token) - self._first), self.num_documents)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one document from `start` to `stop` - 1."""
        return self.source.tokens(self._first + document, start, stop)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets."""
        return self.source.mask(self._first + document, start, stop)

    def span_starts(self, document: int) -> Longs | None:
        """Where the true documents start inside a pack."""
        return self.source.span_starts(self._first + document)

    def type_of(self, document: int) -> str:
        """The type of a document."""
        return self.source.type_of(self._first + document)

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many pieces, one after another."""
        return self.source.gather(documents + self._first, starts, lengths)


class TokenRange(View):
    """Tokens start to stop - 1 of one document of a source, as a source of one document."""

    def __init__(self, source: Source, document: int, start: int, stop: int) -> None:
        super().__init__(source, "", f"{document}-{start}-{stop}")
        self._document, self._start, self._stop = document, start, stop

    @property
    def num_documents(self) -> int:
        """One."""
        return 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the stretch."""
        return self._stop - self._start

    def lengths(self, first: int, last: int) -> Longs:
        """The length of the stretch."""
        return np.array([self.num_tokens], np.int64)[first:last]

    def first_at(self, token: int) -> int:
        """0 for the beginning, else 1: past the only document."""
        return int(token > 0)

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of the stretch from `start` to `stop` - 1."""
        return self.source.tokens(self._document, self._start + start, self._start + stop)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets."""
        return self.source.mask(self._document, self._start + start, self._start + stop)

    def span_starts(self, document: int) -> Longs | None:
        """Where the true documents start inside a pack; the first may be the rest of one."""
        spans = self.source.span_starts(self._document)
        if spans is None:
            return None
        inside = spans[(spans > self._start) & (spans < self._stop)] - self._start
        return np.concatenate([np.zeros(1, np.int64), inside])

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many pieces, one after another."""
        return self.source.gather(documents + self._document, starts + self._start, lengths)

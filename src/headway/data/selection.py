"""Which documents of a source are read. In: a source, a limit, a minimum length, a train/valid
split; out: document numbers and lengths.

The split depends on the document's index alone. If one side would be empty, the document nearest to
the border changes sides; a source of one document gives its last tokens to validation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headway.data.groups import GroupSource
from headway.data.shuffle import mix
from headway.errors import ConfigError, DataError
from headway.store.source import Flags, Longs, TokenRange, TokenSource

log = logging.getLogger("headway")

SCAN_DOCUMENTS = 1 << 20
"""Documents whose lengths are looked at together: bounds memory."""
COUNTED_DOCUMENTS = 1 << 24
"""Lengths that a start looks at to say how much is read: a second or two."""
SPLIT_KEY = 0x5D1B7A2C94E3F061
"""Fixed for ever: another key would move documents between training and validation on resume."""
MIN_SPLIT_TOKENS = 2
"""A token and the next one, which is its target."""


def in_valid(documents: Longs, fraction: float) -> Flags:
    """Which documents belong to the validation side of a split; depends on the index alone."""
    # A uniform hash of 64 bits is below fraction * 2^64 for that share of the documents.
    return mix(documents, SPLIT_KEY) < np.uint64(min(int(fraction * 2.0**64), (1 << 64) - 1))


@dataclass(frozen=True)
class Selection:
    """Which documents of a source are read: the first `limit`, not shorter than `min_length`, one
    side of a train/valid split."""

    source: TokenSource
    limit: int | None = None
    min_length: int = 1
    side: Literal["train", "valid"] | None = None
    fraction: float = 0.0
    max_length: int | None = None
    """Longer documents are left out; None: any length, packing may cut them."""
    moved: int | None = None
    """This document changes sides; without it one side would be empty."""

    @property
    def num_documents(self) -> int:
        """Documents up to the limit, before `min_length` and the split are applied."""
        if self.limit is None:
            return self.source.num_documents
        return min(self.limit, self.source.num_documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of those documents; an estimate if the limit leaves some out."""
        if self.num_documents == self.source.num_documents:
            return self.source.num_tokens
        return max(
            1, round(self.source.num_tokens * self.num_documents / self.source.num_documents)
        )

    def counts(self) -> tuple[int, int]:
        """Documents that are read, and their tokens. Exact up to COUNTED_DOCUMENTS; of more
        documents, these are counted and the result is extrapolated."""
        has_limit = self.num_documents < self.source.num_documents
        is_whole = (
            self.side is None and self.max_length is None and self.min_length <= 1 and not has_limit
        )
        if is_whole:
            return self.num_documents, self.num_tokens

        documents = 0
        tokens = 0
        scanned = min(self.num_documents, COUNTED_DOCUMENTS)
        for first in range(0, scanned, SCAN_DOCUMENTS):
            picked, lengths = self.pick(first, min(first + SCAN_DOCUMENTS, scanned))
            documents += len(picked)
            tokens += int(lengths.sum())
        if scanned < self.num_documents:
            factor = self.num_documents / scanned
            documents = round(documents * factor)
            tokens = round(tokens * factor)
        return documents, tokens

    @property
    def key(self) -> str:
        """Changes whenever the selected content changes."""
        # Row counts are cached under this key. What is not set adds nothing, so that keys of
        # earlier releases stay valid.
        longest = ""
        if self.max_length is not None:
            longest = f"|{self.max_length}"
        moved = ""
        if self.moved is not None:
            moved = f"|moved {self.moved}"
        content = self.source.content_key
        split = f"{self.side}|{self.fraction}"
        return f"{content}|{self.limit}|{self.min_length}|{split}{longest}{moved}"

    def pick(self, first: int, last: int) -> tuple[Longs, Longs]:
        """The selected documents among first to last - 1, and their lengths."""
        last = min(last, self.num_documents)
        if first >= last:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        lengths = self.source.lengths(first, last)
        documents = np.arange(first, last)
        # Empty documents are never read.
        chosen = lengths >= max(1, self.min_length)
        if self.max_length is not None:
            chosen &= lengths <= self.max_length
        if self.side is not None:
            valid = in_valid(documents, self.fraction)
            if self.moved is not None:
                valid ^= documents == self.moved
            chosen &= valid == (self.side == "valid")
        if chosen.all():
            return (documents, lengths)
        return (documents[chosen], lengths[chosen])

    def check(self) -> None:
        """Raise a DataError if nothing is selected."""
        for first in range(0, self.num_documents, SCAN_DOCUMENTS):
            if len(self.pick(first, first + SCAN_DOCUMENTS)[0]):
                return
        # Nothing is selected. If it was the length alone, say so: the remedy is another one.
        if self.max_length is not None and len(
            replace(self, max_length=None).pick(0, self.num_documents)[0]
        ):
            assert isinstance(self.source, GroupSource), "only groups are kept whole"
            shortest = self.max_length // self.source.documents_per_group
            raise DataError(
                f"{self.source.name}: no {self.source.unit} fits into a row of "
                f"data.seq_len={self.max_length} tokens. "
                f"Raise data.seq_len, or tokenize with --max-length {shortest}."
            )
        reason = " with tokens; give other data"
        if self.min_length > 1:
            reason = f" with {self.min_length} tokens or more; lower min_length"
        raise DataError(f"{self.source.name}: holds no document{reason}.")


def split_side(selection: Selection, side: Literal["train", "valid"], fraction: float) -> Selection:
    """One side of a train/valid split of a selection that is not empty; neither side is ever
    empty."""
    # The documents with the lowest and the highest hash: if these two are on different sides, both
    # sides have a document. Usually the first chunk already shows it.
    num_documents = 0
    lowest = None
    highest = None
    for begin in range(0, selection.num_documents, SCAN_DOCUMENTS):
        documents, _ = selection.pick(begin, begin + SCAN_DOCUMENTS)
        if not len(documents):
            continue
        num_documents += len(documents)
        hashes = mix(documents, SPLIT_KEY)
        low = int(np.argmin(hashes))
        high = int(np.argmax(hashes))
        chunk_lowest = (int(hashes[low]), int(documents[low]))
        chunk_highest = (int(hashes[high]), int(documents[high]))
        lowest = min(lowest or chunk_lowest, chunk_lowest)
        highest = max(highest or chunk_highest, chunk_highest)
        sides = in_valid(np.array([lowest[1], highest[1]]), fraction).tolist()
        if sides == [True, False]:
            return replace(selection, side=side, fraction=fraction)
    assert lowest is not None and highest is not None, "the selection is empty"

    if num_documents == 1:
        return _split_document(selection, lowest[1], side, fraction)
    # Both ends are on one side, so all documents are. The one nearest to the border changes sides.
    if bool(in_valid(np.array([lowest[1]]), fraction)[0]):
        moved = highest[1]
    else:
        moved = lowest[1]
    return replace(selection, side=side, fraction=fraction, moved=moved)


def _split_document(
    selection: Selection, document: int, side: Literal["train", "valid"], fraction: float
) -> Selection:
    """A side of the only document: its first tokens train, its last ones validate."""
    source = selection.source
    length = int(source.lengths(document, document + 1)[0])
    min_tokens = max(MIN_SPLIT_TOKENS, selection.min_length)
    is_group = isinstance(source, GroupSource)
    # A part of a conversation may have no token to learn from.
    is_conversation = source.masked and source.span_starts(document) is None
    if is_group or is_conversation or length < 2 * min_tokens:
        content = f"one document, of {length} tokens"
        if is_group:
            content = f"one {source.unit}"
        elif is_conversation:
            content = "one conversation"
        raise ConfigError(
            f"data.valid.fraction is {fraction:g}, but {source.name} holds {content}, which cannot "
            "be split. Add documents, or set data.valid.sets to separate validation data."
        )

    valid_tokens = min(max(min_tokens, round(length * fraction)), length - min_tokens)
    border = length - valid_tokens
    if side == "train":
        view = TokenRange(source, document, 0, border)
    else:
        view = TokenRange(source, document, border, length)
        log.info(
            "%s holds one document: its last %d of %d tokens are for validation",
            source.name,
            valid_tokens,
            length,
        )
    return Selection(view, min_length=selection.min_length)

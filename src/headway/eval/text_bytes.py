"""Bytes of text that tokens stand for: ids of a document come in, its scored bytes go out, so that a loss is divided by what it is about.

A token counts the bytes it spells, also where it begins or ends inside a character; special tokens are no text and count nothing. A space
that the tokenizer puts before a text is no byte of it. Where the tokens do not spell the text byte for byte (unknown characters, a
tokenizer that changes case), the text's bytes are shared out in proportion to what the tokens spell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

UNKNOWN = -1


class TokenBytes:
    """How many bytes each id spells; computed when an id is first seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values())
        # Decoded behind another token: the space with which a text's first token may begin is dropped there.
        self._anchor = tokenizer.encode("a")[-1:]
        self._anchor_bytes = len(tokenizer.decode_bytes(self._anchor))
        self._sizes = np.full(tokenizer.vocab_size, UNKNOWN, np.int64)

    def sizes(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes of each token; ids behind the vocabulary, which spell nothing, have none."""
        wanted = np.asarray(ids, np.int64)
        inside = (wanted >= 0) & (wanted < len(self._sizes))
        wanted = np.where(inside, wanted, 0)
        for one in np.unique(wanted[self._sizes[wanted] == UNKNOWN]).tolist():
            self._sizes[one] = self._size(one)
        return np.where(inside, self._sizes[wanted], 0)

    def begins_with_space(self, token: int) -> bool:
        """Whether the first byte a token spells is a space."""
        return self.tokenizer.decode_bytes([*self._anchor, token])[self._anchor_bytes :].startswith(b" ")

    def _size(self, token: int) -> int:
        if token in self._special:
            return 0
        return max(0, len(self.tokenizer.decode_bytes([*self._anchor, token])) - self._anchor_bytes)


class DocumentBytes:
    """One document while its windows go by, in their order."""

    def __init__(self, table: TokenBytes, ids: Sequence[int], num_bytes: int) -> None:
        self._table, self._ids, self._num_bytes = table, ids, num_bytes
        self._seen = 0
        """Tokens before this one are counted."""
        self._all = self._scored = 0
        self._first_is_scored = False

    def window(self, first: int, end: int) -> None:
        """A window scored the tokens from `first` to `end`."""
        sizes = self._table.sizes(self._ids[self._seen : end])
        self._all += int(sizes.sum())
        self._scored += int(sizes[first - self._seen :].sum())
        self._first_is_scored |= first == 0
        self._seen = end

    def scored(self) -> float | None:
        """Bytes of the text whose tokens were scored; None where the tokens spell nothing of a text that is not empty."""
        self._all += int(self._table.sizes(self._ids[self._seen :]).sum())
        self._seen = len(self._ids)
        if self._all == self._num_bytes + 1 and self._table.begins_with_space(self._ids[0]):
            self._all -= 1
            self._scored -= self._first_is_scored
        if self._all == self._num_bytes:
            return float(self._scored)
        return self._scored * self._num_bytes / self._all if self._all else None

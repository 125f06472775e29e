"""What the loader needs of anything that holds documents of tokens: a native store, a foreign store, generated data.

Documents are numbered from 0 and lie one after another, so that document i starts at the sum of the lengths before it. Nothing here
costs memory or time in proportion to the whole source.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.unsignedinteger | np.signedinteger]
Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Source(Protocol):
    """Documents of tokens. A reader derives from this class and gets `gather` for free; a faster one overrides it."""

    @property
    def name(self) -> str:
        """How messages and metrics call it."""
        ...

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many tokens all documents hold together."""
        ...

    @property
    def masked(self) -> bool:
        """Whether some tokens are no loss targets."""
        ...

    @property
    def max_id(self) -> int:
        """The highest id that occurs (or may occur)."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer that made the ids; None where nobody knows."""
        ...

    @property
    def content_key(self) -> str:
        """Changes whenever the content changes; caches are named by it."""
        ...

    def lengths(self, first: int, last: int) -> Longs:
        """The lengths of documents first to last - 1."""
        ...

    def first_at(self, token: int) -> int:
        """The first document that starts at token offset `token` or later; `num_documents` if none does."""
        ...

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        """The ids of one document from `start` to `stop` - 1."""
        ...

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        """Which of those tokens are loss targets; None where the source is not masked."""
        ...

    def span_starts(self, document: int) -> Longs | None:
        """Where the true documents start inside a pack (0 first); None where a document is just a document."""
        return None

    def type_of(self, document: int) -> str:
        """The type (folder, domain) of a document; empty where documents have none."""
        return ""

    def count_types(self) -> dict[str, tuple[int, int]]:
        """Documents and tokens of each type; empty where documents have none."""
        return {}

    def gather(self, documents: Longs, starts: Longs, lengths: Longs) -> tuple[Ids, Flags | None]:
        """The ids (and loss mask) of many pieces, one after another."""
        pieces = list(zip(documents.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True))
        ids = np.concatenate([np.zeros(0, np.uint16), *(self.tokens(*piece) for piece in pieces)])
        if not self.masked:
            return ids, None
        masks = [found for piece in pieces if (found := self.mask(*piece)) is not None]
        return ids, np.concatenate([np.zeros(0, np.bool_), *masks])

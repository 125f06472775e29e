"""Which pages are in use: reference counts, and the prefix cache, i.e. pages of earlier sequences
that a new one may share. Numbers only; no tensors.

    free        no content
    used        one or more sequences hold it
    kept        no sequence holds it, but its content has a name: the hash of all tokens up to its
                end. Reused when room is needed, the least recently used first

A sequence that begins with the tokens of kept or used pages takes them as they are (`match`). Pages
do not hold the state of windowed and streaming heads, so there a prefix can be continued only where
a snapshot was kept (`StateBlocks` in cache_blocks.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def extend_names(
    names: list[bytes], tokens: Sequence[int], page_tokens: int, pages: int, root: bytes
) -> None:
    """Add names to the list until there are `pages`.

    The name of a page is a hash over its tokens and the name of the page before it, so it stands
    for all tokens up to its end. `root` comes before the first page: whatever else decides the
    content, e.g. an adapter.
    """
    for page in range(len(names), pages):
        previous = names[-1] if names else root
        content = np.array(tokens[page * page_tokens : (page + 1) * page_tokens], dtype=np.int64)
        names.append(hashlib.blake2b(previous + content.tobytes(), digest_size=16).digest())


class PagePool:
    """Pages of one cache."""

    def __init__(self, pages: int) -> None:
        self.num_pages = pages
        # Taken from the end: pages are used in ascending order at first.
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._name: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages without users that have a name, least recently used first."""

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages that a sequence holds."""
        return self.num_pages - self.num_available

    def allocate(self) -> int:
        """A page for new content, with one user. The caller has made sure that one is available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    def take(self, page: int) -> None:
        """One more user of a page with content."""
        # A page without users is in the list of those that may be reused; it leaves it.
        if self._users[page] == 0:
            del self._kept[page]
        self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each page of a sequence, which come in the order of positions."""
        # The last page becomes the least recently used: a prefix is useful without what follows it,
        # but no page is without the pages before it.
        for page in reversed(pages):
            self._users[page] -= 1
            assert self._users[page] >= 0, page
            if self._users[page]:
                continue
            if self._name[page] is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def name(self, page: int, name: bytes) -> None:
        """Name a page whose content is complete.

        If another page has the same content, that one stays the one to share.
        """
        # Two sequences may have computed the same page at the same time.
        if self._name[page] is None and name not in self._page:
            self._name[page] = name
            self._page[name] = page

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The pages of the longest known beginning of a sequence whose pages have these names.

        The caller takes them before it allocates others, which could reuse them.
        """
        pages: list[int] = []
        for name in names:
            page = self._page.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def forget_all(self) -> None:
        """Give back every page without users."""
        while self._kept:
            page, _ = self._kept.popitem()
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        """Drop the name of a page: its content is no longer found."""
        name = self._name[page]
        if name is not None:
            del self._page[name]
            self._name[page] = None

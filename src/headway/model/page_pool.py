"""Who uses which page: counts of users, and the pages of earlier sequences that a new one may share. Numbers only; no tensors.

    free        no content
    used        one or more sequences hold it
    kept        no sequence holds it, but its content has a name: the hash of all tokens up to its end; given back when room is needed,
                least recently used first

A sequence that begins with the tokens of kept or used pages takes them as they are (`match`). Streaming and windowed heads store less than
the whole past, so there a prefix can be continued only where a copy of the rings was kept (`rings`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def extend_names(
    names: list[bytes], tokens: Sequence[int], page_tokens: int, pages: int, root: bytes
) -> None:
    """Add names until there are `pages`: the name of a page is a hash over its tokens and all before it."""
    for page in range(len(names), pages):
        content = np.array(tokens[page * page_tokens : (page + 1) * page_tokens], dtype=np.int64)
        names.append(
            hashlib.blake2b(
                (names[-1] if names else root) + content.tobytes(), digest_size=16
            ).digest()
        )


@dataclass(frozen=True)
class PrefixMatch:
    """What the pool has of a sequence's beginning."""

    pages: tuple[int, ...]
    """Whole pages that can be shared."""
    ring: int | None
    """The kept rings at the end of these pages, for a cache that has rings."""
    known: int
    """Whole pages whose content the pool has; more than `pages` where no rings were kept there."""


class PagePool:
    """Pages and kept rings of one cache."""

    def __init__(self, pages: int, rings: Sequence[int], *, needs_rings: bool) -> None:
        self.num_pages = pages
        self._needs_rings = needs_rings
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._name: list[bytes | None] = [None] * pages
        self._page: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Pages without users that have a name, least recently used first."""
        self._free_rings = list(rings)
        self._rings: OrderedDict[bytes, int] = OrderedDict()
        """Copies of rings, by the name of the page before them."""

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages that a sequence holds."""
        return self.num_pages - self.num_available

    @property
    def num_kept_rings(self) -> int:
        """Copies of rings."""
        return len(self._rings)

    def allocate(self) -> int:
        """A page without content."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    def take(self, page: int) -> None:
        """One more user of a page with content."""
        if self._users[page] == 0:
            del self._kept[page]
        self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One user less, of the pages of a sequence in order: the last one is forgotten first."""
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
        """The content of a page is complete. Where another page has the same content, that one stays the one to share."""
        if self._name[page] is None and name not in self._page:
            self._name[page], self._page[name] = name, page

    def match(self, names: Sequence[bytes]) -> PrefixMatch:
        """The longest beginning that can be shared; the caller takes its pages before it allocates others."""
        pages: list[int] = []
        for name in names:
            page = self._page.get(name)
            if page is None:
                break
            pages.append(page)
        if not self._needs_rings:
            return PrefixMatch(tuple(pages), None, len(pages))
        for count in range(len(pages), 0, -1):
            ring = self._rings.get(names[count - 1])
            if ring is not None:
                self._rings.move_to_end(names[count - 1])
                return PrefixMatch(tuple(pages[:count]), ring, len(pages))
        return PrefixMatch((), None, len(pages))

    def has_ring(self, name: bytes) -> bool:
        """A copy of the rings at the end of this page is kept."""
        return name in self._rings

    def keep_ring(self, name: bytes) -> int | None:
        """Where to copy the rings at the end of a page; None where copies have no room at all or there is one."""
        if name in self._rings:
            self._rings.move_to_end(name)
            return None
        if self._free_rings:
            ring = self._free_rings.pop()
        elif self._rings:
            _, ring = self._rings.popitem(last=False)
        else:
            return None
        self._rings[name] = ring
        return ring

    def forget_all(self) -> None:
        """Give back every page without users and every copy of rings."""
        while self._kept:
            page, _ = self._kept.popitem()
            self._forget(page)
            self._free.append(page)
        self._free_rings += self._rings.values()
        self._rings.clear()

    def _forget(self, page: int) -> None:
        name = self._name[page]
        if name is not None:
            del self._page[name]
            self._name[page] = None

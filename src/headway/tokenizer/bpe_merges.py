"""Byte pairs merged by count, over a table of distinct words: the learning half of byte-level BPE.

In: distinct words as bytes, each with how often it occurs. Out: merges in the order they were
learned. The result is exact for the table: the same merges, ties included (lower ids first), as
counting every occurrence of every word one by one.

All words are in one array of symbols, linked left and right; a merge touches only the positions
of its pair, as whole arrays:

    symbol          [ t h e | t h i s | ... ]     ids; -1 where a merge removed the position
    next, previous  positions of the neighbours in the same word; -1 at a word's ends
    word            which word, hence its weight (how often the word occurs)

Once both of its symbols exist, a pair's count only falls. So a heap with stale entries finds the
best pair, and the positions of a pair are one slice, written when the pair first occurs and
checked when it is merged.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int32]

ID_BITS = 20
"""Bits of an id. A pair is one number, left << ID_BITS | right, which sorts and hashes fast."""
ID_MASK = (1 << ID_BITS) - 1
COUNT_LIMIT = 1 << 62
"""More than any count. The heap gives the smallest entry first, so entries hold the difference."""


@dataclass(frozen=True)
class BpeMerge:
    """Two symbols that become a third."""

    left: int
    right: int
    result: int


def learn_merges(
    words: Sequence[bytes],
    counts: Sequence[int],
    byte_ids: Sequence[int],
    num_tokens: int,
    min_count: int = 2,
    advance: Callable[[float], None] | None = None,
) -> tuple[list[BpeMerge], list[bytes]]:
    """Learn merges until `num_tokens` tokens exist or no pair occurs `min_count` times; also
    returns each token's bytes by id.
    """
    learner = _Learner(words, counts, byte_ids, min_count)
    merges: list[BpeMerge] = []
    while len(learner.tokens) < num_tokens and (pair := learner.best_pair()) is not None:
        merges.append(learner.merge(pair >> ID_BITS, pair & ID_MASK))
        if advance is not None:
            advance(1)

    return merges, learner.tokens


class _Learner:
    """The symbols of all words, and the pairs in them with counts and positions."""

    def __init__(
        self, words: Sequence[bytes], counts: Sequence[int], byte_ids: Sequence[int], min_count: int
    ) -> None:
        self.min_count = min_count
        self.tokens: list[bytes] = [b""] * 256
        for byte, number in enumerate(byte_ids):
            self.tokens[number] = bytes([byte])

        self.weight = np.asarray(counts, dtype=np.int64)
        """[words]"""
        raw = np.frombuffer(b"".join(words), dtype=np.uint8)
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        ends = np.cumsum(lengths)
        assert len(raw) < 2**31, "the word table is cut to fit memory long before this"

        # [bytes of all words] each: a merge never makes more positions, it only removes some.
        self.symbol: Positions = np.asarray(byte_ids, dtype=np.int32)[raw]
        self.word: Positions = np.repeat(np.arange(len(words), dtype=np.int32), lengths)
        self.next: Positions = np.arange(1, len(raw) + 1, dtype=np.int32)
        self.previous: Positions = np.arange(-1, len(raw) - 1, dtype=np.int32)
        # Neighbours in other words are none. An empty word has no first and last position.
        not_empty = lengths > 0
        self.next[ends[not_empty] - 1] = -1
        self.previous[(ends - lengths)[not_empty]] = -1

        self.count: dict[int, int] = {}
        self.positions: dict[int, Positions] = {}
        self.heap: list[int] = []
        self._note_pairs(np.flatnonzero(self.next >= 0).astype(np.int32))

    def best_pair(self) -> int | None:
        """The most frequent pair; among equals the one with the lowest ids."""
        while self.heap:
            entry = heapq.heappop(self.heap)
            pair = entry & ((1 << 2 * ID_BITS) - 1)
            claimed = COUNT_LIMIT - (entry >> 2 * ID_BITS)
            actual = self.count.get(pair, 0)
            # Merges lower the counts of other pairs without touching the heap. An entry that
            # claims too much goes back with the actual count. None claims too little.
            if actual < self.min_count:
                self.count.pop(pair, None)
                self.positions.pop(pair, None)
            elif claimed == actual:
                return pair
            elif claimed > actual:
                self._push(pair, actual)

        return None

    def _push(self, pair: int, count: int) -> None:
        # One number, so that comparing is fast: the higher count first, then the lower pair.
        heapq.heappush(self.heap, (COUNT_LIMIT - count) << 2 * ID_BITS | pair)

    def merge(self, left: int, right: int) -> BpeMerge:
        """Join a pair wherever it occurs.

        No earlier token has the same bytes. All stretches that spell these bytes are split in the
        same way at any time, so such a token would have replaced them all.
        """
        # Picture of one occurrence, by position:     before  first  second  after
        result = len(self.tokens)
        self.tokens.append(self.tokens[left] + self.tokens[right])
        pair = left << ID_BITS | right
        first = self._live_positions(pair, left, right)
        self.count.pop(pair, None)

        # The pairs that touch the occurrences disappear: (before, first) and (second, after). A
        # position counts once, even between two occurrences (`abab`).
        second = self.next[first]
        before = self.previous[first]
        after = self.next[second]
        self._forget_pairs(
            np.unique(np.concatenate([before[before >= 0], first, second[after >= 0]]))
        )

        self.symbol[first] = result
        self.symbol[second] = -1
        self.next[first] = after
        self.previous[after[after >= 0]] = first[after >= 0]

        # New pairs hold the new symbol. `before` is read again: where two occurrences are
        # neighbours, it is now the first position of the one on the left.
        before = self.previous[first]
        self._note_pairs(
            np.unique(np.concatenate([before[before >= 0], first[self.next[first] >= 0]]))
        )
        return BpeMerge(left, right, result)

    def _live_positions(self, pair: int, left: int, right: int) -> Positions:
        """Where the pair still occurs, leftmost first and without overlaps (`aaa` holds one
        `aa`).
        """
        positions = self.positions.pop(pair)
        following = self.next[positions]
        positions = positions[
            (self.symbol[positions] == left) & (following >= 0) & (self.symbol[following] == right)
        ]
        # A run of equal symbols: of its overlapping pairs every second one counts, from the left.
        if left == right and len(positions):
            chained = np.concatenate([[False], self.next[positions[:-1]] == positions[1:]])
            index = np.arange(len(positions))
            start = np.maximum.accumulate(np.where(chained, 0, index))
            positions = positions[(index - start) % 2 == 0]

        return positions

    def _sums(self, positions: Positions) -> tuple[list[int], list[int], Positions, list[int]]:
        """Distinct pairs that begin at these positions, their weights, the positions in the
        order of pairs, each slice's end.
        """
        # A stable sort keeps the positions of a pair in order, which `_live_positions` needs.
        pairs = (
            self.symbol[positions].astype(np.int64) << ID_BITS | self.symbol[self.next[positions]]
        )
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        positions = positions[order]
        starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]]))
        sums = np.add.reduceat(self.weight[self.word[positions]], starts)
        return (
            pairs[starts].tolist(),
            sums.tolist(),
            positions,
            [*starts[1:].tolist(), len(positions)],
        )

    def _forget_pairs(self, positions: Positions) -> None:
        pairs, sums, _, _ = self._sums(positions)
        count = self.count
        for pair, total in zip(pairs, sums, strict=True):
            # Pairs below min_count were never noted.
            if pair in count:
                count[pair] -= total

    def _note_pairs(self, positions: Positions) -> None:
        """Count the pairs that begin at these positions, all of which are new: at first, or with
        a new symbol.
        """
        if not len(positions):
            return

        pairs, sums, positions, ends = self._sums(positions)
        start = 0
        for pair, total, end in zip(pairs, sums, ends, strict=True):
            if total >= self.min_count:
                self.count[pair] = total
                self.positions[pair] = positions[start:end]
                self._push(pair, total)

            start = end

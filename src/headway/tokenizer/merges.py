"""Byte pairs merged by count, over a table of distinct words: the learning half of byte-level BPE.

In: distinct words as bytes, each with how often it occurs. Out: merges in the order they were learned. The result is exact for the
table: the same merges, ties included (lower ids first), as counting every occurrence of every word one by one.

All words lie in one array of symbols, linked left and right; a merge touches only the places of its pair, by whole arrays:

    symbol  [ t h e | t h i s | ... ]     next, previous: places, -1 at a word's ends;     word: which word, hence its weight

A pair's count only falls once both of its symbols exist, so a heap with stale entries finds the best pair, and the places of a pair are
one slice, written when it came into being and checked when it is used.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]

ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1
COUNT_LIMIT = 1 << 62


@dataclass(frozen=True)
class Merge:
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
) -> tuple[list[Merge], list[bytes]]:
    """Learn merges until `num_tokens` tokens exist or no pair occurs `min_count` times; also returns each token's bytes by id."""
    return _Learner(words, counts, byte_ids, min_count).learn(num_tokens, advance)


class _Learner:
    def __init__(self, words: Sequence[bytes], counts: Sequence[int], byte_ids: Sequence[int], min_count: int) -> None:
        self.min_count = min_count
        self.tokens: list[bytes] = [b""] * 256
        for byte, number in enumerate(byte_ids):
            self.tokens[number] = bytes([byte])
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        self.weight = np.asarray(counts, dtype=np.int64)
        raw = np.frombuffer(b"".join(words), dtype=np.uint8)
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        ends = np.cumsum(lengths)
        assert len(raw) < 2**31, "the word table is cut to fit memory long before this"
        self.symbol: Places = np.asarray(byte_ids, dtype=np.int32)[raw]
        self.word: Places = np.repeat(np.arange(len(words), dtype=np.int32), lengths)
        self.next: Places = np.arange(1, len(raw) + 1, dtype=np.int32)
        self.previous: Places = np.arange(-1, len(raw) - 1, dtype=np.int32)
        filled = lengths > 0
        self.next[ends[filled] - 1] = -1
        self.previous[(ends - lengths)[filled]] = -1
        self.count: dict[int, int] = {}
        self.places: dict[int, Places] = {}
        self.heap: list[int] = []
        self._note_pairs(np.flatnonzero(self.next >= 0).astype(np.int32))

    def learn(self, num_tokens: int, advance: Callable[[float], None] | None) -> tuple[list[Merge], list[bytes]]:
        merges: list[Merge] = []
        while len(self.tokens) < num_tokens:
            pair = self._best_pair()
            if pair is None:
                break
            before = len(self.tokens)
            merges.append(self._merge(pair >> ID_BITS, pair & ID_MASK))
            if advance is not None:
                advance(len(self.tokens) - before)
        return merges, self.tokens

    def _best_pair(self) -> int | None:
        """The most frequent pair; among equals the one with the lowest ids."""
        while self.heap:
            entry = heapq.heappop(self.heap)
            pair = entry & ((1 << 2 * ID_BITS) - 1)
            claimed, actual = COUNT_LIMIT - (entry >> 2 * ID_BITS), self.count.get(pair, 0)
            if actual < self.min_count:
                self.count.pop(pair, None)
                self.places.pop(pair, None)
            elif claimed == actual:
                return pair
            elif claimed > actual:
                self._push(pair, actual)
        return None

    def _push(self, pair: int, count: int) -> None:
        heapq.heappush(self.heap, (COUNT_LIMIT - count) << 2 * ID_BITS | pair)

    def _merge(self, left: int, right: int) -> Merge:
        joined = self.tokens[left] + self.tokens[right]
        known = self.ids.get(joined)
        result = len(self.tokens) if known is None else known
        if known is None:
            self.tokens.append(joined)
            self.ids[joined] = result
        pair = left << ID_BITS | right
        first = self._live_places(pair, left, right)
        self.count.pop(pair, None)
        second = self.next[first]
        before, after = self.previous[first], self.next[second]
        self._forget_pairs(np.unique(np.concatenate([before[before >= 0], first, second[after >= 0]])))
        self.symbol[first] = result
        self.symbol[second] = -1
        self.next[first] = after
        self.previous[after[after >= 0]] = first[after >= 0]
        if known is None:
            before = self.previous[first]
            self._note_pairs(np.unique(np.concatenate([before[before >= 0], first[self.next[first] >= 0]])))
        else:
            self._recount(result)
        return Merge(left, right, result)

    def _live_places(self, pair: int, left: int, right: int) -> Places:
        """Where the pair still stands, leftmost first and without overlaps (`aaa` holds one `aa`)."""
        places = self.places.pop(pair)
        following = self.next[places]
        places = places[(self.symbol[places] == left) & (following >= 0) & (self.symbol[following] == right)]
        if left == right and len(places):
            chained = np.concatenate([[False], self.next[places[:-1]] == places[1:]])
            index = np.arange(len(places))
            start = np.maximum.accumulate(np.where(chained, 0, index))
            places = places[(index - start) % 2 == 0]
        return places

    def _recount(self, symbol: int) -> None:
        """Count all pairs of one symbol anew, because it was made a second way (`a`+`bc` after `ab`+`c`)."""
        here = np.flatnonzero(self.symbol == symbol).astype(np.int32)
        before = self.previous[here]
        self._note_pairs(np.unique(np.concatenate([before[before >= 0], here[self.next[here] >= 0]])))

    def _sums(self, places: Places) -> tuple[list[int], list[int], Places, list[int]]:
        """Distinct pairs that begin at these places, their weights, the places in the order of pairs, and where each pair's slice ends."""
        pairs = self.symbol[places].astype(np.int64) << ID_BITS | self.symbol[self.next[places]]
        order = np.argsort(pairs, kind="stable")
        pairs, places = pairs[order], places[order]
        starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]]))
        sums = np.add.reduceat(self.weight[self.word[places]], starts)
        return pairs[starts].tolist(), sums.tolist(), places, [*starts[1:].tolist(), len(places)]

    def _forget_pairs(self, places: Places) -> None:
        pairs, sums, _, _ = self._sums(places)
        count = self.count
        for pair, total in zip(pairs, sums, strict=True):
            if pair in count:
                count[pair] -= total

    def _note_pairs(self, places: Places) -> None:
        if not len(places):
            return
        pairs, sums, places, ends = self._sums(places)
        start = 0
        for pair, total, end in zip(pairs, sums, ends, strict=True):
            if total >= self.min_count:
                self.count[pair] = total
                self.places[pair] = places[start:end]
                self._push(pair, total)
            start = end

"""ROUGE-L of one text against all texts kept so far, exactly and at once.

The kept texts lie behind each other in one long bit vector V, a guard bit after each. The bit-parallel rule for the longest common
subsequence (U = V & M; V = (V + U) | (V - U), where M marks where the next token occurs) then runs over all of them in one addition:
a carry that leaves a text ends in its guard bit, which is cleared. Zeros left in a text's bits are the length of the subsequence.
"""

from __future__ import annotations

import re
from array import array

import numpy as np

from headway.text.self_instruct.task import Language

_WORD = re.compile(r"\w+")
Scores = np.ndarray[tuple[int], np.dtype[np.float64]]


def tokens_of(text: str, language: Language) -> list[str]:
    """What is compared: lower-case words, or for Chinese every character that is a letter or a digit."""
    words = _WORD.findall(text.lower())
    return words if language == "en" else [character for word in words for character in word]


class SimilarityIndex:
    """Texts that are kept, as tokens; `scores` compares a new one with each of them."""

    def __init__(self) -> None:
        self._places: dict[str, array[int]] = {}
        self._starts = array("q")
        self._lengths = array("q")
        self._bits = 0
        self._size = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, tokens: list[str]) -> None:
        """Keep a text of at least one token."""
        assert tokens, "a text without tokens is like no other"
        for offset, token in enumerate(tokens):
            self._places.setdefault(token, array("q")).append(self._size + offset)
        self._starts.append(self._size)
        self._lengths.append(len(tokens))
        self._bits |= ((1 << len(tokens)) - 1) << self._size
        self._size += len(tokens) + 1

    def scores(self, tokens: list[str]) -> Scores:
        """The ROUGE-L F score, 0 to 1, against every kept text in the order they were added."""
        if not len(self):
            return np.zeros(0)
        marks = {token: self._mark(token) for token in set(tokens)}
        left = self._bits
        for token in tokens:
            if mark := marks[token]:
                common = left & mark
                left = ((left + common) | (left - common)) & self._bits
        raw = np.frombuffer(left.to_bytes(self._size // 8 + 1, "little"), dtype=np.uint8)
        ones = np.add.reduceat(np.unpackbits(raw, bitorder="little").astype(np.int64), np.array(self._starts))
        lengths = np.array(self._lengths)
        return 2.0 * (lengths - ones) / (lengths + len(tokens))

    def _mark(self, token: str) -> int:
        places = self._places.get(token)
        if places is None:
            return 0
        row = np.zeros(self._size + 1, dtype=np.uint8)
        row[np.array(places)] = 1
        return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")

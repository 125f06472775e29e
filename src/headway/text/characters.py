"""The kinds of a text's characters: a text comes in, how many letters, digits, signs, controls and
Han characters it has goes out.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

LETTER, DIGIT, SIGN, SPACE, CONTROL, HAN = range(6)
"""Kinds of characters."""
_CLASS_OF = {"L": LETTER, "M": LETTER, "N": DIGIT, "P": SIGN, "S": SIGN, "Z": SPACE, "C": CONTROL}


@dataclass(frozen=True)
class CharacterCounts:
    """The number of characters of each kind in a text; Han characters count as letters too."""

    letters: int
    digits: int
    signs: int
    controls: int
    han: int

    @property
    def visible(self) -> int:
        """All characters that are not spaces."""
        return self.letters + self.digits + self.signs + self.controls


def count_characters(text: str) -> CharacterCounts:
    """Count the characters of each kind in a text."""
    # One look-up for the whole text is far faster than asking for the category of each character.
    counts = np.bincount(_table()[code_points(text)], minlength=6).tolist()
    return CharacterCounts(
        counts[LETTER] + counts[HAN],
        counts[DIGIT],
        counts[SIGN],
        counts[CONTROL],
        counts[HAN],
    )


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """The characters of a text as numbers."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


@cache
def _table() -> npt.NDArray[np.uint8]:
    """The kind of every code point; line ends and tabs are spaces, the replacement character is
    a control.
    """
    table: Any = np.full(0x110000, CONTROL, dtype=np.uint8)
    # Planes 4 to 16 hold no letters, only private use and tags.
    for point in range(0x40000):
        char = chr(point)
        if char.isspace():
            table[point] = SPACE
        else:
            table[point] = _CLASS_OF[unicodedata.category(char)[0]]

    # CJK unified ideographs, their extensions and the compatibility forms.
    for first, last in ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)):
        table[first : last + 1] = HAN

    table[0xFFFD] = CONTROL
    return table

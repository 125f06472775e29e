"""What kinds of characters a text is made of, counted by whole arrays."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

LETTER, DIGIT, SIGN, SPACE, CONTROL, HAN = range(6)
_CLASS_OF = {"L": LETTER, "M": LETTER, "N": DIGIT, "P": SIGN, "S": SIGN, "Z": SPACE, "C": CONTROL}


@dataclass(frozen=True)
class Kinds:
    """How many characters of each kind a text has; Han characters count as letters too."""

    letters: int
    digits: int
    signs: int
    spaces: int
    controls: int
    han: int

    @property
    def visible(self) -> int:
        """All characters that are no spaces."""
        return self.letters + self.digits + self.signs + self.controls


def kinds(text: str) -> Kinds:
    """Count the kinds of characters in a text."""
    counts = np.bincount(_table()[code_points(text)], minlength=6).tolist()
    return Kinds(counts[LETTER] + counts[HAN], counts[DIGIT], counts[SIGN], counts[SPACE], counts[CONTROL], counts[HAN])


def code_points(text: str) -> npt.NDArray[np.uint32]:
    """The characters of a text as numbers."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


@cache
def _table() -> npt.NDArray[np.uint8]:
    """The kind of every code point; line ends and tabs are spaces, the replacement character is a control."""
    table: Any = np.full(0x110000, CONTROL, dtype=np.uint8)
    # Planes 4 to 16 hold no letters, only private use and tags.
    for point in range(0x40000):
        char = chr(point)
        table[point] = SPACE if char.isspace() else _CLASS_OF[unicodedata.category(char)[0]]
    for first, last in ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)):
        table[first : last + 1] = HAN
    table[0xFFFD] = CONTROL
    return table

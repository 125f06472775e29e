"""Tokens become text while they are generated: the text so far comes in after each token, and what cannot change any more goes out.

    bytes so far        e4 bd | e4 bd a0 e5 | e4 bd a0 e5 a5 bd
    goes out                    你              好

A character is shown when its last byte is there, and the beginning of a stop text only when it turned out to be something else. All
pieces joined are the text of the generation.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

Say = Callable[[str], object]
"""Receives the next piece of a text."""
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one sequence on its way to `say`."""

    def __init__(self, say: Say, stops: Sequence[str] = ()) -> None:
        self.say, self.stops = say, stops
        self.shown = ""

    def update(self, new: bytes) -> None:
        """Say what the bytes of all new tokens settle."""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(new)
        # Tokenizers that cannot give bytes write the sign for a character whose last token is still to come.
        text = text.rstrip(UNKNOWN)
        text = text[: len(text) - self._waiting(text)]
        if text.startswith(self.shown):
            self._say(text)

    def finish(self, text: str) -> None:
        """Say the rest of the whole text."""
        self._say(text)

    def _say(self, text: str) -> None:
        if len(text) > len(self.shown):
            self.say(text[len(self.shown) :])
            self.shown = text

    def _waiting(self, text: str) -> int:
        """How many last characters may become a stop text."""
        return max((size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)

"""The ids of one request become text as they arrive. A piece goes out when nothing that follows can
change it.

    tokens -> bytes -> whole characters -> all but the beginning of a stop text

All pieces joined are the text of the request, cut before the first stop text. Each token costs the
same, however long the text is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from headway.tokenizer.load import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
CONTEXT = 16
"""Tokens that are decoded before a new one, for tokenizers whose text of a token depends on those
before it."""
MAX_PENDING = 8
"""Tokens that may wait for the end of a character; no character has more bytes than four."""


class RequestText:
    """The text of one request. `prompt_tail`: the last ids of its prompt, so that no tokenizer
    drops the first space."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._context = list(prompt_tail)[-CONTEXT:]
        self._before = len(tokenizer.decode_bytes(self._context, skip_special=True))
        """Bytes of the context alone: what follows them is new."""
        self._pending: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        """Text that may be the beginning of a stop text."""
        self.stopped = False
        """A stop text has appeared: the request can be cancelled, and nothing more comes out."""
        self.num_tokens = 0
        """Tokens up to and including the one that completed a stop text."""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain after some more tokens."""
        pieces: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._certain(self._decoder.decode(self._bytes(token))))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text; no token follows."""
        if self.stopped:
            return ""
        # An incomplete character at the end becomes the replacement sign; nothing will complete it.
        rest = self._take(final=True)
        certain = self._certain(self._decoder.decode(rest, final=True))
        if self.stopped:
            return certain
        held = self._held
        self._held = ""
        return certain + held

    def _bytes(self, token: int) -> bytes:
        self._pending.append(token)
        return self._take(final=False)

    def _take(self, *, final: bool) -> bytes:
        """The bytes of the pending tokens, unless the last character is not complete."""
        if not self._pending:
            return b""
        whole = self._tokenizer.decode_bytes([*self._context, *self._pending], skip_special=True)
        new = whole[self._before :]
        # Tokenizers that cannot give bytes write the sign for a character whose last token is still
        # to come.
        if not final and new.endswith(UNKNOWN) and len(self._pending) < MAX_PENDING:
            return b""
        # A bounded context: the cost of a token does not grow with the text.
        self._context = [*self._context, *self._pending][-CONTEXT:]
        self._before = len(self._tokenizer.decode_bytes(self._context, skip_special=True))
        self._pending = []
        return new

    def _certain(self, new: str) -> str:
        """What may go out after some more text; the beginning of a possible stop text is held
        back."""
        if not self._stops or not new:
            return new
        text = self._held + new
        places = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        # The first stop text in the text counts, whichever of them it is.
        if places:
            self.stopped = True
            self._held = ""
            return text[: min(places)]

        # What may be the beginning of a stop text stays back: the longest such end of the text.
        held = 0
        for stop in self._stops:
            for size in range(1, len(stop)):
                if text.endswith(stop[:size]):
                    held = max(held, size)
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]

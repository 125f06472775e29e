"""JSON (a list of objects, or objects one after another) and JSON lines (one object per line,
blank lines skipped).

Only one object is in memory at a time. Damage is reported at its place in the file, not after
the whole file was read.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, cast

from headway.errors import DataError
from headway.text.document import Record, place_of
from headway.text.raw import RawFile, decode, lines, whole_characters

CHUNK_BYTES = 1 << 18
"""What is read at once, at least."""
WHITE = re.compile(r"[ \t\r\n]*")
DECODER = json.JSONDecoder()
NEAR_END = 16
r"""An error this close to the end of what was read may only mean that the rest is not read yet
(`tru`, `\u00`). Characters."""


def read_jsonl(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The objects of a file with one object per line."""
    for number, line in lines(raw):
        if line.strip():
            yield Record(parse_object(line, raw.name, number), raw.name, number)


def parse_object(text: str, name: str, line: int) -> dict[str, Any]:
    """One JSON object, or an error that names file and line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{name}:{line}: not valid JSON at column {error.colno}: {error.msg}. Each line must "
            "be one JSON object."
        ) from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{name}:{line}: not readable JSON: {error}.") from None

    if not isinstance(value, dict):
        raise DataError(
            f"{name}:{line}: a JSON {type(value).__name__}; each line must be one JSON object, as "
            f'in {{"text": "..."}}.'
        )

    return value


def read_json(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The objects of a file, each with the line it begins on."""
    with raw.open() as stream:
        text = _Text(stream, raw.name)
        first = text.skip_white()
        if first == "[":
            # One object at a time, although JSON would have the whole list at once.
            yield from _list(text)
        elif first:
            while text.skip_white():
                yield text.take_object()


def _list(text: _Text) -> Iterator[Record]:
    """The objects of a list; `text` is at its opening bracket."""
    text.at += 1
    if text.skip_white() == "]":
        text.at += 1
    else:
        while True:
            text.number = (text.number or 0) + 1
            text.skip_white()
            yield text.take_object()
            mark = text.skip_white()
            text.at += 1
            if mark == "]":
                break

            if not mark:
                text.fail("the list is cut short")
            if mark != ",":
                text.fail(f"',' or ']' expected, {mark!r} found")

    text.number = None
    if text.skip_white():
        text.fail("something follows the list")


class _Text:
    """A window onto the decoded file: `buffer[at:]` is not consumed yet; `line` is the line of
    `at`.
    """

    def __init__(self, stream: io.BufferedIOBase, name: str) -> None:
        self.stream = stream
        self.name = name
        self.buffer = ""
        self.at = 0
        self.line = 1
        self.number: int | None = None
        """In a list: which entry is read, from 1."""
        self._cut_bytes = b""
        """Bytes of a character that the end of a chunk cuts."""
        self._ended = False

    def skip_white(self) -> str:
        """Go to the next character that is not white space and return it; empty at the end of
        the file.
        """
        while True:
            white = WHITE.match(self.buffer, self.at)
            self.go_to(white.end() if white else self.at)
            if self.at < len(self.buffer) or not self._read_on():
                return self.buffer[self.at : self.at + 1]

    def take_object(self) -> Record:
        """The object that begins here, with the line it begins on; the position moves behind it."""
        # Decoding starts anew with more text until the object is whole. Each read doubles the text,
        # so this costs about twice the time of decoding it once.
        while True:
            try:
                value, end = DECODER.raw_decode(self.buffer, self.at)
                break
            except json.JSONDecodeError as error:
                unfinished = (
                    error.msg.startswith("Unterminated string")
                    or error.pos >= len(self.buffer) - NEAR_END
                )
                if unfinished and self._read_on():
                    continue

                hint = ""
                if unfinished:
                    hint = ", the file may be cut short"
                self.go_to(min(error.pos, len(self.buffer)))
                self.fail(f"not valid JSON: {error.msg}{hint}")
            except (RecursionError, ValueError) as error:
                self.fail(f"not readable JSON: {error}")

        # A list of texts or numbers is valid JSON, but holds no records.
        if not isinstance(value, dict):
            self.fail(
                f'a JSON {type(value).__name__} where an object is expected, as in {{"text": '
                f'"..."}}'
            )

        record = Record(cast(dict[str, Any], value), self.name, self.line, self.number)
        self.go_to(end)
        return record

    def go_to(self, position: int) -> None:
        """Consume up to a position of the buffer."""
        self.line += self.buffer.count("\n", self.at, position)
        self.at = position

    def fail(self, why: str) -> NoReturn:
        """Raise an error with the place."""
        raise DataError(f"{place_of(self.name, self.line, self.number)}: {why}.")

    def _read_on(self) -> bool:
        """Read at least as much as is waiting, so that a long object takes linear time; False at
        the end of the file.
        """
        if self._ended:
            return False

        is_first = not self.buffer and self.line == 1
        waiting = self.buffer[self.at :]
        data = self._cut_bytes + self.stream.read(max(CHUNK_BYTES, len(waiting)))
        self._ended = len(data) == len(self._cut_bytes)
        # The end of a chunk may cut a character, whose bytes wait for the rest. At the end of the
        # file there is none, and decoding them raises the error.
        end = len(data)
        if not self._ended:
            end = whole_characters(data)

        self._cut_bytes = data[end:]
        # Line 1 means the beginning of the file, where `decode` drops a byte order mark.
        line = 1
        if not is_first:
            line = max(2, self.line + waiting.count("\n"))
        self.buffer = waiting + decode(data[:end], self.name, line)
        self.at = 0
        return not self._ended

"""`Record`: an object of a raw file. `Document`: the text of a record or of a text file.

Both know their file and line or row, so that every later error can name them.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from headway.config.options import option
from headway.errors import ConfigError, DataError

TextSplit = Literal["file", "line"]
"""A text file is one document, or each of its lines is one."""


def place_of(source: str, line: int | None, number: int | None = None) -> str:
    """`file`, `file:line` or `file:line (record 3)`."""
    if line is None:
        location = source
    else:
        location = f"{source}:{line}"
    if number is None:
        return location
    return f"{location} (record {number})"


@dataclass(frozen=True)
class Record:
    """One object of a file; `line` counts from 1 (rows, in files that have no lines)."""

    data: dict[str, Any]
    source: str
    """The file, as messages name it; `archive.zip:member.jsonl` in an archive."""
    line: int | None
    number: int | None = None
    """In a JSON list: the entry, counted from 1 (a list may be on one line)."""

    @property
    def place(self) -> str:
        """`file:line`, with the number of the entry in a list."""
        return place_of(self.source, self.line, self.number)


@dataclass(frozen=True)
class Document:
    """One text, and the record it comes from, if any."""

    text: str
    source: str
    line: int | None = None
    record: Mapping[str, Any] | None = None

    @property
    def place(self) -> str:
        """`file:line`."""
        if self.line is None:
            return self.source
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class TextOf:
    """How a record becomes a text: the value of `text_key`, or a template such as
    `{title}\\n{content}`.
    """

    text_key: str = option("text", "Key that holds the text of a record.")
    template: str | None = option(
        None, "Build the text from several keys, e.g. '{title}\\n{content}'."
    )

    def __post_init__(self) -> None:
        # A mistake in the template is found here, before any file is read.
        self.parts()

    def parts(self) -> list[tuple[str, str | None]]:
        """The template as (literal, key) pairs; `\\n` and `\\t` may be typed as two characters."""
        if self.template is None:
            return [("", self.text_key)]

        try:
            fields = list(
                string.Formatter().parse(self.template.replace("\\n", "\n").replace("\\t", "\t"))
            )
        except ValueError as error:
            raise ConfigError(
                f"template is {self.template!r}: {error}. Write keys as {{key}}, braces "
                f"themselves as {{{{ and }}}}."
            ) from None

        if not any(key for _, key, _, _ in fields):
            raise ConfigError(
                f"template is {self.template!r}; it must name at least one key, as in "
                f"'{{title}}\\n{{content}}'."
            )

        # Python's formatter also knows {}, {key:>5} and {key!r}, which mean nothing here.
        if any(key == "" or form or change for _, key, form, change in fields):
            raise ConfigError(
                f"template is {self.template!r}; keys are written {{key}}, without numbers, ':' "
                "or '!'."
            )

        return [(literal, key) for literal, key, _, _ in fields]

    def keys(self) -> list[str]:
        """The keys a record must have."""
        return [key for _, key in self.parts() if key is not None]

    def __call__(self, record: Record) -> Document:
        """The document of a record; a missing key or a value that is not text is an error with
        its place.
        """
        pieces: list[str] = []
        for literal, key in self.parts():
            pieces.append(literal)
            if key is not None:
                pieces.append(self._value(record, key))

        text = "".join(pieces)

        # As in records/parse_turns.py: a lone surrogate from a JSON escape cannot be encoded as
        # UTF-8.
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{record.place}: the text has a lone surrogate at character {error.start}, "
                    "which is not valid Unicode."
                ) from None

        return Document(text, record.source, record.line, record.data)

    def _value(self, record: Record, key: str) -> str:
        """The value of a record under a key, as text."""
        value = look_up(record.data, key)
        if value is MISSING:
            present = ", ".join(map(str, record.data)) or "none"
            flag = "text_key" if self.template is None else "template"
            raise DataError(
                f"{record.place}: the record has no key {key!r} ({flag}); its keys are "
                f"{present}.{_other_kind(record.data)}"
            )

        # In a template a value is one of several: null is left out, and numbers are written.
        if self.template is not None:
            if value is None:
                return ""
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return str(value)

        if not isinstance(value, str):
            raise DataError(f"{record.place}: {key!r} is {_kind(value)}; a text is expected.")

        return value


@dataclass(frozen=True)
class Reading(TextOf):
    """How texts are read from files of any kind."""

    split: TextSplit = option(
        "file", "A .txt file is one document (file), or each of its lines is one (line)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in ("file", "line"):
            raise ConfigError(f"--split is {self.split!r}; it must be 'file' or 'line'.")

    @property
    def text_of(self) -> TextOf:
        """How a record becomes a text."""
        return TextOf(self.text_key, self.template)


MISSING = object()
"""No such key; unlike None, which is JSON's null."""


def look_up(data: Mapping[str, Any], key: str) -> Any:
    """A record's value under a key or a dotted path through nested objects (`meta.title`), else
    MISSING.
    """
    # A key that itself has a dot comes first.
    if key in data:
        return data[key]

    value: Any = data
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING

        value = cast(Mapping[str, Any], value)[part]

    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return f"of type {type(value).__name__}"


def _other_kind(data: Mapping[str, Any]) -> str:
    """A hint for records that are conversations or preference pairs."""
    if {"chosen", "rejected"} <= data.keys():
        return _remedy("preference pairs", "preference")
    if data.keys() & {"messages", "conversations", "conversation", "instruction"}:
        return _remedy("conversations", "chat")
    return ""


def _remedy(records: str, kind: str) -> str:
    """What to do about records that are no texts; true of every verb that reads texts, of which
    few have --kind.
    """
    return (
        f" These look like {records}: set kind: {kind} in a recipe; elsewhere make a token store "
        f"of them with `headway data tokenize --kind {kind}` and give that."
    )

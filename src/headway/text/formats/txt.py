"""Plain text: a file is one document, or each of its lines that is not blank is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from headway.errors import ConfigError
from headway.text.document import Document
from headway.text.raw import RawFile, decode, lines

Split = Literal["file", "line"]


def read_text(raw: RawFile, split: Split = "file") -> Iterator[Document]:
    """The documents of a text file."""
    if split == "line":
        yield from (Document(text, raw.name, number) for number, text in lines(raw) if text.strip())
    elif split == "file":
        with raw.open() as stream:
            text = decode(stream.read(), raw.name, 1)
        if text:
            yield Document(text, raw.name)
    else:
        raise ConfigError(f"split is {split!r}; it must be 'file' or 'line'.")

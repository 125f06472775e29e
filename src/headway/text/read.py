"""Raw data of any known format as one stream of documents or records, in bounded memory.

In: files, folders, globs, dataset folders (see `formats.SUPPORTED`). Out: `Document`s or `Record`s in the order of `expand`.
Invariant: nothing is skipped or replaced in silence; a file that yields nothing is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

from headway.errors import ConfigError, DataError
from headway.text.document import Document, Record, TextOf, TextSplit
from headway.text.expand import expand
from headway.text.formats import FORMATS, MODULES, SUPPORTED
from headway.text.raw import RawFile, archive_members, decode, lines, text_blocks

__all__ = ["Document", "Record", "expand", "read_blocks", "read_documents", "read_records"]

T = TypeVar("T")
SNIFF_BYTES = 4096


def read_documents(
    paths: Sequence[Path | str] | Path | str,
    *,
    text_key: str = "text",
    template: str | None = None,
    split: TextSplit = "file",
    keep_record: bool = False,
) -> Iterator[Document]:
    """Every document of some files, folders or globs; a record's text is its `text_key`, or `template` filled from it.

    `keep_record` leaves all of a record in `Document.record`; without it only the keys of the text are sure to be there.
    """
    text_of = TextOf(text_key, template)
    keys = None if keep_record else text_of.keys()
    for path in expand(paths):
        yield from _some(_documents(RawFile.at(path), text_of, split, keys), path)


def read_blocks(
    paths: Sequence[Path | str] | Path | str,
    *,
    text_key: str = "text",
    template: str | None = None,
    split: TextSplit = "file",
    keep_record: bool = False,
) -> Iterator[tuple[Document, Iterator[str]]]:
    """As `read_documents`, but each document comes with its text in blocks, to be read before the next document.

    The text of a .txt file is in the blocks alone, and never in memory as a whole.
    """
    text_of = TextOf(text_key, template)
    keys = None if keep_record else text_of.keys()
    for path in expand(paths):
        yield from _some(_in_blocks(RawFile.at(path), text_of, split, keys), path)


def read_records(paths: Sequence[Path | str] | Path | str) -> Iterator[Record]:
    """Every record of some files, folders or globs, as it lies in them; plain text holds none."""
    for path in expand(paths):
        yield from _some(_records(RawFile.at(path)), path)


def _some(items: Iterator[T], path: Path) -> Iterator[T]:
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        raise DataError(f"{path}: no documents; the file is empty.")


def _documents(raw: RawFile, text_of: TextOf, split: TextSplit, keys: list[str] | None) -> Iterator[Document]:
    kind = _kind(raw)
    if kind == "txt":
        yield from read_text(raw, split)
    elif kind in ("zip", "tar"):
        for member in _data_members(raw, kind):
            yield from _documents(member, text_of, split, keys)
    else:
        yield from map(text_of, _read(kind, raw, keys))


def read_text(raw: RawFile, split: TextSplit = "file") -> Iterator[Document]:
    """The documents of a text file: the whole file, or each line that is not blank."""
    if split == "line":
        yield from (Document(text, raw.name, number) for number, text in lines(raw) if text.strip())
    elif split == "file":
        with raw.open() as stream:
            text = decode(stream.read(), raw.name, 1)
        if text:
            yield Document(text, raw.name)
    else:
        raise ConfigError(f"split is {split!r}; it must be 'file' or 'line'.")


def _in_blocks(raw: RawFile, text_of: TextOf, split: TextSplit, keys: list[str] | None) -> Iterator[tuple[Document, Iterator[str]]]:
    kind = _kind(raw)
    if kind == "txt" and split == "file":
        blocks = text_blocks(raw)
        if (begin := next(blocks, None)) is not None:
            yield Document("", raw.name), chain([begin], blocks)
    elif kind in ("zip", "tar"):
        for member in _data_members(raw, kind):
            yield from _in_blocks(member, text_of, split, keys)
    else:
        yield from ((document, iter([document.text])) for document in _documents(raw, text_of, split, keys))


def _records(raw: RawFile) -> Iterator[Record]:
    kind = _kind(raw)
    if kind == "txt":
        raise DataError(f"{raw.name}: a text file holds no records; give json, jsonl, csv or parquet.")
    if kind in ("zip", "tar"):
        for member in _data_members(raw, kind):
            yield from _records(member)
    else:
        yield from _read(kind, raw, None)


def _read(kind: str, raw: RawFile, keys: list[str] | None) -> Iterator[Record]:
    return getattr(importlib.import_module(f"headway.text.formats.{MODULES[kind]}"), f"read_{kind}")(raw, keys)


def _data_members(raw: RawFile, kind: str) -> Iterator[RawFile]:
    """The members of a known format, as from a folder; an archive inside an archive is an error."""
    for member in archive_members(raw, kind):
        inner = FORMATS.get(member.suffix)
        if inner in ("zip", "tar"):
            raise DataError(f"{member.name}: an archive inside an archive is not read; unpack the outer one.")
        if inner is not None:
            yield member


def _kind(raw: RawFile) -> str:
    """The format of a file: by its name, else by how its content begins."""
    return FORMATS.get(raw.suffix) or _sniff(raw)


def _sniff(raw: RawFile) -> str:
    with raw.open() as stream:
        head = stream.read(SNIFF_BYTES)
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, kind in ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"PK\x03\x04", "zip"), (b"<mediawiki", "mediawiki")):
        if begin.startswith(magic):
            return kind
    if head[257:262] == b"ustar":
        return "tar"
    if b"\x00" in head or (head and _is_binary(head)):
        raise DataError(f"{raw.name}: unknown format. Supported: {SUPPORTED}.")
    return "json" if begin.startswith((b"{", b'[{"')) else "txt"


def _is_binary(head: bytes) -> bool:
    """Whether the first bytes can be no UTF-8, apart from a character cut at their end."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start < len(head) - 3
    return False

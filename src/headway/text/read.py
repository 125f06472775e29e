"""Raw data in any known format as one stream of documents or records, in bounded memory.

In: files, folders, globs, dataset folders (see `formats.SUPPORTED`). Out: `Document`s or
`Record`s in the order of `expand`. Invariant: nothing is skipped or replaced silently; a file
without documents is an error.
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
"""How much of a file without a known suffix is looked at."""
MAGIC = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"PK\x03\x04", "zip"),
    (b"<mediawiki", "mediawiki"),
)
"""How files of some formats begin."""
TAR_MARK = slice(257, 262)
"""Where the first header of a tar has the mark `ustar`."""


def read_documents(
    paths: Sequence[Path | str] | Path | str,
    *,
    text_key: str = "text",
    template: str | None = None,
    split: TextSplit = "file",
    keep_record: bool = False,
) -> Iterator[Document]:
    """Every document of some files, folders or globs; a record's text is its `text_key`, or
    `template` filled from it.

    `keep_record` leaves the whole record in `Document.record`; without it only the keys of the
    text are sure to be there.
    """
    text_of = TextOf(text_key, template)
    keys = None
    if not keep_record:
        keys = text_of.keys()

    for path in expand(paths):
        yield from not_empty(documents_of(RawFile.at(path), text_of, split, keys), path)


def read_blocks(
    paths: Sequence[Path | str] | Path | str,
    *,
    text_key: str = "text",
    template: str | None = None,
    split: TextSplit = "file",
    keep_record: bool = False,
) -> Iterator[tuple[Document, Iterator[str]]]:
    """As `read_documents`, but each document comes with its text in blocks. Read the blocks
    before taking the next document.

    The text of a .txt file is in the blocks only, and never in memory as a whole.
    """
    text_of = TextOf(text_key, template)
    keys = None
    if not keep_record:
        keys = text_of.keys()

    for path in expand(paths):
        yield from not_empty(blocks_of(RawFile.at(path), text_of, split, keys), path)


def read_records(paths: Sequence[Path | str] | Path | str) -> Iterator[Record]:
    """Every record of some files, folders or globs, unchanged; text files hold no records."""
    for path in expand(paths):
        yield from not_empty(records_of(RawFile.at(path)), path)


def read_anything(paths: Sequence[Path | str] | Path | str) -> Iterator[Record | RawFile]:
    """Every record of some files, folders or globs; a text file, which holds no records, comes
    as a whole.
    """
    for path in expand(paths):
        for kind, raw in _data_files(RawFile.at(path)):
            if kind == "txt":
                yield raw
            else:
                yield from _read(kind, raw, None)


def not_empty(items: Iterator[T], path: Path | str) -> Iterator[T]:
    """The items; none at all is an error, raised where a caller takes the first one."""
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        raise no_documents(path)


def no_documents(path: Path | str) -> DataError:
    """What is wrong with a file without documents."""
    return DataError(f"{path}: no documents; the file is empty.")


def documents_of(
    file: RawFile, text_of: TextOf, split: TextSplit, keys: list[str] | None
) -> Iterator[Document]:
    """The documents of one file, or of the part of it that `file` states."""
    for kind, raw in _data_files(file):
        if kind == "txt":
            yield from read_text(raw, split)
        else:
            yield from map(text_of, _read(kind, raw, keys))


def blocks_of(
    file: RawFile, text_of: TextOf, split: TextSplit, keys: list[str] | None
) -> Iterator[tuple[Document, Iterator[str]]]:
    """The documents of one file, each with its text in blocks."""
    for kind, raw in _data_files(file):
        if kind == "txt" and split == "file":
            # The first block is read in advance: a file without text has no document.
            blocks = text_blocks(raw)
            begin = next(blocks, None)
            if begin is not None:
                yield Document("", raw.name), chain([begin], blocks)
            continue

        # A record or line is in memory anyway, so its text is one block.
        if kind == "txt":
            documents = read_text(raw, split)
        else:
            documents = map(text_of, _read(kind, raw, keys))
        for document in documents:
            yield document, iter([document.text])


def records_of(file: RawFile) -> Iterator[Record]:
    """The records of one file, or of the part of it that `file` states."""
    for kind, raw in _data_files(file):
        if kind == "txt":
            raise DataError(
                f"{raw.name}: a text file holds no records; give json, jsonl, csv or parquet."
            )
        yield from _read(kind, raw, None)


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


def _read(kind: str, raw: RawFile, keys: list[str] | None) -> Iterator[Record]:
    # Imported by name when a file needs it: some formats need large packages (pyarrow, numpy).
    module = importlib.import_module(f"headway.text.formats.{MODULES[kind]}")
    return getattr(module, f"read_{kind}")(raw, keys)


def _data_files(raw: RawFile) -> Iterator[tuple[str, RawFile]]:
    """A file and its format, or every data file of an archive; an archive inside an archive is
    an error.
    """
    kind = FORMATS.get(raw.suffix) or _sniff(raw)
    if kind not in ("zip", "tar"):
        yield kind, raw
        return

    # Members of other formats (a README, pictures) are passed over, as in a folder.
    for member in archive_members(raw, kind):
        inner = FORMATS.get(member.suffix)
        if inner in ("zip", "tar"):
            raise DataError(
                f"{member.name}: an archive inside an archive is not read; unpack the outer one."
            )

        if inner is not None:
            yield inner, member


def _sniff(raw: RawFile) -> str:
    """The format of a file without a known suffix, from how it begins."""
    with raw.open() as stream:
        head = stream.read(SNIFF_BYTES)

    # Texts may begin with a byte order mark and white space.
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for magic, kind in MAGIC:
        if begin.startswith(magic):
            return kind

    if head[TAR_MARK] == b"ustar":
        return "tar"
    if b"\x00" in head or (head and _is_binary(head)):
        raise DataError(f"{raw.name}: unknown format. Supported: {SUPPORTED}.")

    # The JSON reader also reads JSON lines: objects one after another.
    if begin.startswith((b"{", b'[{"')):
        return "json"
    return "txt"


def _is_binary(head: bytes) -> bool:
    """Whether the first bytes are not UTF-8, apart from a character cut at their end."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # The last character has up to four bytes, of which up to three are here.
        return error.start < len(head) - 3
    return False

"""Raw data of any known format as one stream of documents or records, in bounded memory.

In: files, folders, globs (see `formats.SUPPORTED`). Out: `Document`s or `Record`s in a fixed order: paths as given, files sorted.
Invariant: nothing is skipped or replaced in silence; a file that yields nothing is an error.
"""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from headway.errors import ConfigError, DataError
from headway.text.document import Document, Record, TextOf
from headway.text.formats import FORMATS, SUPPORTED
from headway.text.formats.txt import Split, read_text
from headway.text.raw import RawFile

T = TypeVar("T")
NOT_DATA = ("readme", "license", "dataset_info", "state.json", "dataset_dict", "dataset_infos")


def read_documents(
    paths: Sequence[Path | str] | Path | str, *, text_key: str = "text", template: str | None = None, split: Split = "file"
) -> Iterator[Document]:
    """Every document of some files, folders or globs; a record's text is its `text_key`, or `template` filled from it."""
    text_of = TextOf(text_key, template)
    for path in expand(paths):
        yield from _some(_documents(RawFile.at(path), text_of, split), path)


def read_records(paths: Sequence[Path | str] | Path | str) -> Iterator[Record]:
    """Every record of some files, folders or globs, as it lies in them."""
    for path in expand(paths):
        yield from _some(_records(RawFile.at(path)), path)


def expand(paths: Sequence[Path | str] | Path | str) -> list[Path]:
    """The files that paths, folders and globs stand for; what stands for none is an error."""
    if isinstance(paths, (str, Path)):
        paths = [paths]
    if not paths:
        raise ConfigError("no input is given; name at least one file, folder or glob.")
    return [file for path in paths for file in _expand_one(path)]


def _expand_one(given: Path | str) -> list[Path]:
    path = Path(given)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _is_data(p.relative_to(path)))
        if not found:
            raise DataError(f"{path}: the folder holds no data. Supported: {SUPPORTED}.")
        return found
    matches = sorted(Path(p) for p in glob.glob(str(given), recursive=True))
    files = [p for p in matches if p.is_file()]
    if not files:
        raise DataError(f"{given}: no such file or folder{', and no file matches' if glob.has_magic(str(given)) else ''}.")
    return files


def _is_data(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts) or path.name.lower().startswith(NOT_DATA):
        return False
    return RawFile.at(path).suffix in FORMATS


def _some(items: Iterator[T], path: Path) -> Iterator[T]:
    empty = True
    for item in items:
        empty = False
        yield item
    if empty:
        raise DataError(f"{path}: no documents; the file is empty.")


def _documents(raw: RawFile, text_of: TextOf, split: Split) -> Iterator[Document]:
    kind = FORMATS.get(raw.suffix)
    if kind == "txt":
        return read_text(raw, split)
    return map(text_of, _records(raw))


def _records(raw: RawFile) -> Iterator[Record]:
    kind = FORMATS.get(raw.suffix)
    if kind is None:
        raise DataError(f"{raw.name}: unknown format. Supported: {SUPPORTED}.")
    if kind == "txt":
        raise DataError(f"{raw.name}: a text file holds no records; give json, jsonl, csv or parquet.")
    return importlib.import_module(f"headway.text.formats.{kind}").read(raw)

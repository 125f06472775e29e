"""Raw files in a format of the user. In: files and the module that reads them; out: one JSONL file in the cache, read like any other.

The module has a function `read(raw)` that yields a dict for each record of a `RawFile` (`raw.open()` gives its bytes, decompressed;
`raw.name` is its name for errors). It is called once for the same files and the same code.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.config.user_code import import_user_module
from headway.data.config import default_cache_dir
from headway.errors import ConfigError, DataError, HeadwayError, first_line
from headway.prepare.records_file import FOLDER, write_records
from headway.runtime.storage import sha256_file, write_atomic
from headway.store.checksums import Checksums
from headway.store.file_lock import file_lock
from headway.text.raw import RawFile


def read_own_format(path: str, format_name: str, cache_dir: Path | None = None) -> Path:
    """The records of a file, a folder or a glob, read by the user's module and written to the cache."""
    module = import_user_module(format_name, "data format")
    if not callable(getattr(module, "read", None)):
        raise ConfigError(
            f"data format is {format_name[:200]!r}, but that module has no function read(raw); a format needs one."
        )
    cache, files = cache_dir or default_cache_dir(), _files(path)
    checksums = Checksums(cache)
    named = [
        (file.name, file.stat().st_size, checksum)
        for file, checksum in zip(files, checksums.of_all(files), strict=True)
    ]
    code = None if module.__file__ is None else sha256_file(Path(module.__file__))
    key = hashlib.sha256(repr((named, format_name, code)).encode()).hexdigest()[:32]
    known = cache / FOLDER / f"{key}.name"
    if (found := _known(known)) is None:
        with file_lock(
            known.with_suffix(".lock"), until=lambda: _known(known) is not None
        ) as builds:
            if builds:
                written = write_records(
                    _records(files, module, format_name), cache, name=Path(path).name
                )
                write_atomic(known, written.name)
        found = _known(known)
    assert found is not None
    return found


def _known(known: Path) -> Path | None:
    """The file with the records of some files, if they were read before."""
    try:
        found = known.with_name(Path(known.read_text(encoding="utf-8")).name)
    except OSError:
        return None
    return found if found.is_file() else None


def _files(path: str) -> list[Path]:
    """All files of a path; their suffixes do not matter."""
    where = Path(path)
    if where.is_file():
        return [where]
    found = where.rglob("*") if where.is_dir() else map(Path, glob.glob(path, recursive=True))
    files = sorted(file for file in found if file.is_file() and not file.name.startswith("."))
    if not files:
        raise DataError(f"{path}: there are no files. Give a file, a folder or a glob.")
    return files


def _records(files: Sequence[Path], module: ModuleType, format_name: str) -> Iterator[Any]:
    for file in files:
        number = 0
        try:
            for record in module.read(RawFile.at(file)):
                yield record
                number += 1
        except (HeadwayError, GeneratorExit):
            raise
        except Exception as error:  # a user's reader may raise anything
            after = f" after record {number}" if number else ""
            raise DataError(
                f"{file}: {format_name} failed{after}: {type(error).__name__}: {first_line(error)}."
            ) from error

"""Raw files in a format of the user. In: files and the module that reads them; out: one JSONL file
in the cache, read like any other.

The module has a function `read(raw)` that yields a dict for each record of a `RawFile`
(`raw.open()` gives its bytes, decompressed; `raw.name` is its name for errors). It is called once
for the same files and the same code.
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
    """The records of a file, a folder or a glob, read by the user's module and written to the
    cache."""
    module = import_user_module(format_name, "data format")
    if not callable(getattr(module, "read", None)):
        raise ConfigError(
            f"data format is {format_name[:200]!r}, but that module has no function read(raw); a "
            "format needs one."
        )
    cache = cache_dir or default_cache_dir()
    files = _files(path)
    contents = [
        (file.name, file.stat().st_size, checksum)
        for file, checksum in zip(files, Checksums(cache).of_all(files), strict=True)
    ]
    # Edited code reads the same files anew.
    code = None
    if module.__file__ is not None:
        code = sha256_file(Path(module.__file__))
    key = hashlib.sha256(repr((contents, format_name, code)).encode()).hexdigest()[:32]

    # The file of records is named by its own content, which is known only when it is written. So a
    # small file, named by what it is made of, holds its name.
    pointer = cache / FOLDER / f"{key}.name"
    written = _written(pointer)
    if written is None:
        with file_lock(
            pointer.with_suffix(".lock"), until=lambda: _written(pointer) is not None
        ) as builds:
            if builds:
                records = _records(files, module, format_name)
                target = write_records(records, cache, name=Path(path).name)
                write_atomic(pointer, target.name)
        written = _written(pointer)
    assert written is not None
    return written


def _written(pointer: Path) -> Path | None:
    """The file with the records of some files, if they were read before."""
    try:
        # The name alone: a pointer must not lead outside of the cache.
        name = Path(pointer.read_text(encoding="utf-8")).name
    except OSError:
        return None
    written = pointer.with_name(name)
    return written if written.is_file() else None


def _files(path: str) -> list[Path]:
    """All files of a path; their suffixes do not matter."""
    location = Path(path)
    if location.is_file():
        return [location]
    if location.is_dir():
        candidates = location.rglob("*")
    else:
        candidates = map(Path, glob.glob(path, recursive=True))
    files = sorted(file for file in candidates if file.is_file() and not file.name.startswith("."))
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
        # Our own errors name the file already; GeneratorExit means that the consumer has stopped.
        except (HeadwayError, GeneratorExit):
            raise
        except Exception as error:  # a user's reader may raise anything
            after = ""
            if number:
                after = f" after record {number}"
            raise DataError(
                f"{file}: {format_name} failed{after}: {type(error).__name__}: {first_line(error)}."
            ) from error

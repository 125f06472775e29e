"""Records of a running program as a raw file: dicts, a Hugging Face dataset or an iterator come in;
a JSONL file in the cache goes out.

The file is named after a hash of its content, so the same records give the same file and therefore
the same token store. Records are read once and written as they come: memory does not grow with
them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headway.data.config import default_cache_dir
from headway.errors import DataError
from headway.runtime.storage import writing
from headway.runtime.temporary import clear_leftovers, temporary_name

FOLDER = "records"
BUFFER_BYTES = 1 << 20
"""The buffer of the file that is written."""


def write_records(
    records: Iterable[Mapping[str, Any]], cache_dir: Path | None = None, *, name: str = "data"
) -> Path:
    """Write records to a file in the cache, one line of JSON each; errors call them `name`. An
    iterator is consumed."""
    folder = (cache_dir or default_cache_dir()) / FOLDER
    with writing(folder, error=DataError):
        folder.mkdir(parents=True, exist_ok=True)
        # A killed program left its part of a file behind.
        clear_leftovers(folder / f"{name}.jsonl")
        partial = temporary_name(folder / f"{name}.jsonl")
        file = partial.open("xb", buffering=BUFFER_BYTES)

    # The name is the hash of the content, so it is known only at the end.
    digest = hashlib.sha256()
    try:
        with file:
            number = -1
            for number, record in enumerate(_iterate(records, name)):
                line = _line(record, f"{name}[{number}]")
                digest.update(line)
                with writing(partial, error=DataError):
                    file.write(line)
            if number < 0:
                raise DataError(
                    f"{name}: there are no records. Give at least one; an iterator can be read "
                    "only once."
                )
            with writing(partial, error=DataError):
                file.flush()
                os.fsync(file.fileno())

        target = folder / f"{digest.hexdigest()[:32]}.jsonl"
        with writing(target, error=DataError):
            os.replace(partial, target)
        return target
    finally:
        partial.unlink(missing_ok=True)


def _iterate(records: Iterable[Any], name: str) -> Iterable[Any]:
    # One record, or a dataset of several splits: iterating over it would give its keys.
    if isinstance(records, Mapping):
        keys = ", ".join(map(str, list(records)[:5]))
        raise DataError(
            f"{name} is a mapping with the keys {keys}; give a list of records, or one split of a "
            "dataset."
        )
    try:
        return iter(records)
    except TypeError:
        raise DataError(
            f"{name} is a {type(records).__name__}; give a path, a list of dicts, a dataset or an "
            "iterator of dicts."
        ) from None


def _line(record: Any, place: str) -> bytes:
    if not isinstance(record, Mapping):
        hint = "Give dicts."
        if isinstance(record, str):
            hint = 'Write {"text": ...} for a text.'
        raise DataError(f"{place} is a {type(record).__name__}; a record is a dict. {hint}")
    try:
        # NaN is not JSON: other readers of the file would refuse it.
        line = json.dumps(record, ensure_ascii=False, default=_plain, allow_nan=False)
        return line.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{place}: cannot be written as JSON: {error}. Leave that key out, or convert it to "
            "text or numbers."
        ) from None


def _plain(value: Any) -> Any:
    """What json does not know: numbers and arrays of numpy, and mappings that are no dicts."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")

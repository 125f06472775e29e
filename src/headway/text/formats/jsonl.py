"""One JSON object per line; blank lines are passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from headway.errors import DataError
from headway.text.document import Record
from headway.text.raw import RawFile, lines


def read(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The objects of a file, each with its line."""
    for number, line in lines(raw):
        if line.strip():
            yield Record(parse_object(line, raw.name, number), raw.name, number)


def parse_object(text: str, name: str, line: int) -> dict[str, Any]:
    """One JSON object, or an error that names file and line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{name}:{line}: not valid JSON at column {error.colno}: {error.msg}. Each line must be one JSON object.") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{name}:{line}: not readable JSON: {error}.") from None
    if not isinstance(found, dict):
        raise DataError(f'{name}:{line}: a JSON {type(found).__name__}; each line must be one JSON object, as in {{"text": "..."}}.')
    return found

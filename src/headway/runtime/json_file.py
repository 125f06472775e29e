"""JSON files that others wrote, or that a crash truncated: returns a value or raises one of two
errors.

One rule for every reader: only regular files, of a bounded size, and nesting of any depth is an
ordinary error.
"""

import errno
import json
import os
from pathlib import Path
from typing import Any, cast

from headway.config.regular_file import regular_only
from headway.errors import HeadwayError

LARGEST_BYTES = 1 << 28
"""Larger than any JSON file that headway expects."""


def read_bounded(path: Path, largest: int = LARGEST_BYTES) -> bytes:
    """The bytes of a regular file.

    A device, a pipe and a file beyond `largest` bytes are an OSError like any other.
    """
    with open(path, "rb", opener=regular_only) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            raise OSError(
                errno.EFBIG, f"has {size} bytes; at most {largest} are expected", str(path)
            )
        return file.read(size + 1)  # bounded also if the file grows meanwhile


def load_json(path: Path, largest: int = LARGEST_BYTES) -> Any:
    """The value in a JSON file.

    Raises only OSError if it cannot be read and ValueError if it is not JSON.
    """
    content = read_bounded(path, largest)
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None


def read_object(path: Path, error: type[HeadwayError]) -> dict[str, Any]:
    """The object in a JSON file.

    What is damaged, too deep or too large, or another value, is an `error` that names the file.
    """
    try:
        value = load_json(path)
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}.") from None
    except ValueError as problem:
        raise error(f"{path}: not JSON: {' '.join(str(problem).split())[:200]}.") from None
    if not isinstance(value, dict):
        raise error(f"{path}: must contain a mapping, not a {type(value).__name__}.")
    return cast(dict[str, Any], value)

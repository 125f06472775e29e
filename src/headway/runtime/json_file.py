"""JSON files that others wrote: whatever is in one, an object comes out or one line says what is wrong."""

import json
from pathlib import Path
from typing import Any, cast

from headway.errors import HeadwayError

LARGEST_BYTES = 1 << 28


def read_object(path: Path, error: type[HeadwayError]) -> dict[str, Any]:
    """The object in a JSON file; text that is damaged, too deep or too large, or another value, is an `error` that names the file."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise error(f"{path}: has {path.stat().st_size} bytes; a JSON file of at most {LARGEST_BYTES} is expected.")
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror or problem}.") from None
    except (ValueError, MemoryError) as problem:
        raise error(f"{path}: not JSON: {' '.join(str(problem).split())[:200]}.") from None
    except RecursionError:
        raise error(f"{path}: not read: its values lie too deep in one another.") from None
    if not isinstance(found, dict):
        raise error(f"{path}: must hold a mapping, not a {type(found).__name__}.")
    return cast(dict[str, Any], found)

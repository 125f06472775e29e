"""Values that come out of a sandbox: [type, content] as `program.py` writes them -> a value of
Python's own types. Whatever else arrives is a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable
from typing import Any, cast

COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class NoValueError(ValueError):
    """There is no plain value: the expression raised, or it has another type."""


def read_values(text: str, count: int) -> list[Any]:
    """The contents of all values that a program sent; exactly `count` of them in one object."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise NoValueError("no values arrived") from None
    values = message.get("values") if isinstance(message, dict) else None
    if not isinstance(values, list) or len(cast(list[Any], values)) != count:
        raise NoValueError("not the values that were asked for")
    return cast(list[Any], values)


def decode(encoded: Any) -> Any:
    """The value of one encoded value."""
    try:
        return _decoded(encoded)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        raise NoValueError("no plain value") from None


def _decoded(encoded: Any) -> Any:
    if not isinstance(encoded, list):
        raise TypeError
    kind, *contents = cast(list[Any], encoded)
    if kind == "none":
        return None
    content = contents[0]
    if kind == "complex":
        # Hexadecimal is exact, and has texts for NaN and infinity, which JSON lacks.
        return complex(float.fromhex(content), float.fromhex(contents[1]))
    if kind == "dict":
        pairs = [(_hashable(_decoded(key)), _decoded(value)) for key, value in content]
        return dict(pairs)
    if kind in COLLECTIONS:
        if not isinstance(content, list):
            raise TypeError
        return COLLECTIONS[kind](_decoded(item) for item in cast(list[Any], content))
    return _atom(kind, content)


def _atom(kind: Any, content: Any) -> Any:
    """A value without parts. Only the exact types of JSON are taken: nothing is converted."""
    if kind == "bool" and type(content) is bool:
        return content
    if type(content) is not str:
        raise TypeError
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float.fromhex(content)
    if kind == "str":
        return content
    if kind == "bytes":
        return bytes.fromhex(content)
    raise ValueError


def _hashable(value: Any) -> Hashable:
    hash(value)
    return value

"""The JSON object of a request: bytes come in, values of the expected types go out, or an ApiError that names the field.

Null means the same as a field that is missing. Every field is read, known to be harmless, or refused by its name: nothing is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, cast

from headway.serve.api_errors import ApiError, bad_field

HARMLESS = frozenset(
    (
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    )
)
"""Fields that change no answer: names of the user, storage and prices of another service, hints for its speed."""
MAX_DEPTH = 64
MAX_VALUES = 200_000


def read_json(body: bytes) -> dict[str, Any]:
    """The object of a request's body."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"The body is not JSON: {' '.join(str(error).split())[:200]}."
        ) from None
    if not isinstance(found, dict):
        raise ApiError(400, "The body must be a JSON object.")
    check_tree(found)
    return cast(dict[str, Any], found)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def check_tree(found: Any) -> None:
    """Refuse what is nested too deep, holds too many values, or has text that is not valid Unicode. Numbers in lists are not counted."""
    waiting: list[tuple[Any, int]] = [(found, 0)]
    count = 0
    while waiting:
        one, depth = waiting.pop()
        count += 1
        if count + len(waiting) > MAX_VALUES:
            raise ApiError(400, f"The body holds more than {MAX_VALUES} lists, objects and texts.")
        if depth > MAX_DEPTH:
            raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.")
        if isinstance(one, str):
            check_text(one)
        elif isinstance(one, dict):
            waiting += [
                (part, depth + 1) for pair in cast(dict[str, Any], one).items() for part in pair
            ]
        elif isinstance(one, list):
            waiting += [
                (part, depth + 1)
                for part in cast(list[Any], one)
                if not isinstance(part, (int, float))
            ]


def check_text(text: str) -> None:
    """Refuse a lone surrogate, which no tokenizer takes and no answer can repeat."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(
                400,
                f"A text of the body is not valid Unicode: a lone surrogate at character {error.start}.",
            ) from None


class BodyFields:
    """The fields of an object; `where` is its place in the body."""

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self.data, self.where = data, where
        self.read: set[str] = set()

    def name(self, field: str) -> str:
        """A field as the client finds it."""
        return f"{self.where}.{field}" if self.where else field

    def get(self, field: str) -> Any:
        """Any value; None if it is missing."""
        self.read.add(field)
        return self.data.get(field)

    def text(self, field: str, default: str | None = None) -> str | None:
        """A text."""
        found = self.get(field)
        if found is None:
            return default
        if not isinstance(found, str):
            raise self.wrong(field, "a text")
        return found

    def needed_text(self, field: str) -> str:
        """A text that must be there."""
        found = self.text(field)
        if found is None:
            raise bad_field(self.name(field), "is missing; it must be a text.")
        return found

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        found = self.get(field)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise self.wrong(field, "true or false")
        return found

    def whole(self, field: str, low: int, high: int, default: int | None = None) -> int | None:
        """A whole number in bounds."""
        found = self.get(field)
        if found is None:
            return default
        if isinstance(found, float) and found.is_integer() and abs(found) < 2**53:
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int) or not low <= found <= high:
            raise self.wrong(field, f"a whole number from {low} to {high}")
        return found

    def number(self, field: str, low: float, high: float, default: float) -> float:
        """A number in bounds."""
        found = self.get(field)
        if found is None:
            return default
        if (
            isinstance(found, bool)
            or not isinstance(found, (int, float))
            or not low <= found <= high
            or not math.isfinite(found)
        ):
            raise self.wrong(field, f"a number from {low:g} to {high:g}")
        return float(found)

    def objects(self, field: str) -> list[Mapping[str, Any]]:
        """A list of objects; empty if it is missing."""
        found = self.get(field)
        if found is None:
            return []
        if not isinstance(found, list) or not all(
            isinstance(one, dict) for one in cast(list[Any], found)
        ):
            raise self.wrong(field, "a list of objects")
        return cast(list[Mapping[str, Any]], found)

    def inner(self, field: str) -> BodyFields | None:
        """An object."""
        found = self.get(field)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self.wrong(field, "an object")
        return BodyFields(cast(dict[str, Any], found), self.name(field))

    def wrong(self, field: str, expected: str) -> ApiError:
        """The error of a value that is not what is expected."""
        shown = json.dumps(self.data.get(field), ensure_ascii=False, default=str)
        return bad_field(
            self.name(field),
            f"is {shown[:80]}{'...' if len(shown) > 80 else ''}; it must be {expected}.",
        )

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Refuse the fields that nothing has read."""
        for field, value in self.data.items():
            if field not in self.read and field not in harmless and value not in (None, [], {}):
                raise ApiError(
                    400,
                    f"{self.name(field)[:100]} is not supported by this server. Leave it out.",
                    self.name(field)[:100],
                )

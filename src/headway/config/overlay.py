"""Settings on top of settings: plain data of a recipe and of a stage or a change come in, the merged data goes out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from headway.config.section import ALTERNATIVES

CHOICES = ("kind", "preset")
"""A section that sets one of these to another value replaces the whole section below it."""


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay the settings of a stage over those of its recipe; plain data in and out.

    Mappings merge key by key; anything else is replaced. A section with another `kind` or `preset` is replaced as a whole. A setting
    removes its alternatives: a stage with `epochs` does not have the recipe's `steps`.
    """
    result = dict(below)
    for ways in ALTERNATIVES:
        if any(key in above for way in ways for key in way):
            for way in ways:
                if not any(key in above for key in way):
                    for key in way:
                        result.pop(key, None)
    for key, value in above.items():
        there = result.get(key)
        if (
            isinstance(value, dict)
            and isinstance(there, dict)
            and not chooses(cast(Any, there), cast(Any, value))
        ):
            result[key] = overlay(cast(Any, there), cast(Any, value))
        else:
            result[key] = value
    return result


def chooses(there: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether a section chooses another kind or preset."""
    return any(key in value and value[key] != there.get(key) for key in CHOICES)

"""Which code outside of headway a recipe names, found in its plain data: nothing is imported to find out."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MODULE_KEYS = ("kind", "family", "objective", "optim", "hook")
"""Hold a dotted module where they do not name a file of headway's."""
FUNCTION_KEYS = ("function", "state")
"""Hold module:function."""


@dataclass(frozen=True)
class OutsideCode:
    """One module, function or program that a recipe names."""

    key: str
    action: str
    is_imported: bool
    """Runs as soon as the recipe is read; a program is started only by a run."""

    def __str__(self) -> str:
        return f"{self.key} {self.action}"


def outside_code(data: Any, at: str = "") -> Iterator[OutsideCode]:
    """Everything in a recipe that names code of somebody else's."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        place = f"{at}.{key}" if at else str(key)
        is_short_tracker = at.endswith("track") and isinstance(key, int)
        if isinstance(value, str):
            if "." in value and (key in MODULE_KEYS or is_short_tracker):
                yield OutsideCode(place, f"imports the module {value}", True)
            elif ":" in value and key in FUNCTION_KEYS:
                yield OutsideCode(place, f"calls {value}", True)
        elif key == "command" and isinstance(value, list):
            yield OutsideCode(place, f"starts {' '.join(map(str, value))}", False)
        else:
            yield from outside_code(value, place)

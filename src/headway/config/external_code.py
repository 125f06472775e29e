"""Which code outside headway a recipe names: plain data comes in, modules, functions and programs
go out. Nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headway.config.user_code import is_file_name

MODULE_KEYS = ("kind", "family", "objective", "optim", "hook", "format")
"""Keys whose value names a user's module if it has a dot; without one it is a kind of headway."""
FUNCTION_KEYS = ("function", "state")
"""Keys whose value is module:function."""


@dataclass(frozen=True)
class ExternalCode:
    """One module, function or program outside headway that a recipe names."""

    key: str
    action: str
    is_imported: bool
    """Whether it is imported when the recipe is loaded. A program is only started by a run."""
    module: str | None = None
    """The module's dotted name, or the path of a file."""

    def __str__(self) -> str:
        return f"{self.key} {self.action}"


def find_external_code(data: Any, path: str = "") -> Iterator[ExternalCode]:
    """All code outside headway that a recipe names, found in its plain data without importing
    anything.
    """
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    else:
        items = ()

    for key, value in items:
        key_path = f"{path}.{key}" if path else str(key)
        is_listed = isinstance(key, int)

        if isinstance(value, str):
            names_module = key in MODULE_KEYS or (is_listed and path.endswith("track"))
            names_function = key in FUNCTION_KEYS or (is_listed and path.endswith("callbacks"))
            if "." in value and names_module:
                noun = "file" if is_file_name(value) else "module"
                yield ExternalCode(
                    key_path, f"imports the {noun} {value}", is_imported=True, module=value
                )
            elif ":" in value and names_function:
                module, _, _ = value.rpartition(":")
                yield ExternalCode(key_path, f"calls {value}", is_imported=True, module=module)
        elif key == "command" and isinstance(value, list):
            command = " ".join(map(str, value))
            yield ExternalCode(key_path, f"starts {command}", is_imported=False)
        else:
            yield from find_external_code(value, key_path)

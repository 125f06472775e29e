"""Options of commands as fields of the dataclass that they fill. In: a default and its help; out: a field with both.

    @dataclass(frozen=True)
    class PackOptions:
        pack_length: int = option(..., "Tokens of a pack.")
        intact: bool = option(False, "prulong: drop the rest of a cut document.", "--intact")

A command takes such a dataclass as one parameter; `cli/_options.py` shows its fields as options. Fields without `option` are no options.
Nothing here imports the command line, and a module with such a dataclass is imported for every help: it imports nothing large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.errors import ConfigError

OPTION = "option"
"""Key of a field's metadata."""
SAME = object()


@dataclass(frozen=True)
class CommandOption:
    """How a field is written on the command line."""

    default: Any
    """As a person would write it; ... if the option must be given."""
    help: str
    flags: tuple[str, ...]
    """Other than the name of the field."""
    shown: dict[str, Any]
    """metavar, min and max, as typer takes them."""
    read: Callable[[Any], Any] | None
    """From what is written to the value of the field; None: they are the same."""


def option(
    default: Any,
    help: str,
    *flags: str,
    written: Any = SAME,
    read: Callable[[Any], Any] | None = None,
    **shown: Any,
) -> Any:
    """Declare a field that is also an option. `read` makes its value of what is written, whose default is `written`."""
    if written is SAME:
        written = default
    metadata = {OPTION: CommandOption(written, help, flags, shown, read)}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` -> (2, 8)."""
    part, slash, parts = text.partition("/")
    if not slash or not part.isdigit() or not parts.isdigit() or int(part) >= int(parts):
        raise ConfigError(f"--shard is {text!r}; it must be I/N with I from 0 to N - 1, e.g. 0/8.")
    return int(part), int(parts)

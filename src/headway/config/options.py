"""Options of commands as fields of the dataclass that they fill. In: a default and its help; out: a
field with both.

    @dataclass(frozen=True)
    class PackOptions:
        pack_length: int = option(..., "Tokens of a pack.")
        intact: bool = option(False, "prulong: drop the rest of a cut document.", "--intact")

A command takes such a dataclass as one parameter; `cli/_options.py` shows its fields as options.
Fields without `option` are no options. A field of type `tuple[T, ...]` may be repeated on the
command line. Nothing here imports the command line, and a module with such a dataclass is imported
for every help: it imports nothing large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.errors import ConfigError

OPTION = "option"
"""Key of a field's metadata."""
INNER_OPTIONS = "inner options"
"""Key of the metadata of a field that has options itself."""
SAME = object()
"""Default of `written`: it is the default of the field. None would be a default of its own."""
TEMPLATE_FLAGS = ("--chat-template", "--template")
"""One option: every verb that takes a chat template accepts both spellings."""
PROMPT_TEMPLATE_HELP = "Treat prompts as questions in this chat template: a name, tokenizer (the model's own) or a .jinja file."


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
    written_type: Any
    """With `read`: the type of what is written."""


def option(
    default: Any,
    help: str,
    *flags: str,
    written: Any = SAME,
    read: Callable[[Any], Any] | None = None,
    written_type: Any = None,
    **shown: Any,
) -> Any:
    """Declare a field that is also an option.

    Where the command line writes the value in another form (`4GB` for a number of bytes), `read`
    turns that form into the value of the field. `written` is the default in that form, and
    `written_type` its type; by default that of `written`, or text if `written` is None.
    """
    if written is SAME:
        written = default
    if written_type is None:
        written_type = str | None
        if written is not None:
            written_type = type(written)
    metadata = {OPTION: CommandOption(written, help, flags, shown, read, written_type)}
    # A dataclass field without a default must be given.
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def inner_options(default: Any) -> Any:
    """Declare a field whose value is a dataclass with options. They stand among those of the outer
    one."""
    return field(default=default, metadata={INNER_OPTIONS: True})


def parse_shard(text: str) -> tuple[int, int]:
    """`2/8` -> (2, 8)."""
    index, slash, count = text.partition("/")
    if not slash or not index.isdigit() or not count.isdigit() or int(index) >= int(count):
        raise ConfigError(f"--shard is {text!r}; it must be I/N with I from 0 to N - 1, e.g. 0/8.")
    return int(index), int(count)


def parse_numbers(flag: str, text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write numbers, comma separated.") from None

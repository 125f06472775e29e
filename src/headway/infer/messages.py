"""Conversations that wait for an answer: a file in OpenAI's shape comes in, conversations go out,
or one line that says why not.

    .json     {"messages": [{"role": "user", "content": "..."}, ...]} or the list alone;
              or a list of several of these
    .jsonl    one of these per line
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, DataError
from headway.records.chat import Conversation
from headway.records.parse_turns import TurnReader, tools_of
from headway.runtime.json_file import read_bounded
from headway.tokenizer.chat_template import Turn

LARGEST_BYTES = 64 << 20
"""Of a file of conversations, which is read as a whole."""
SHAPE = 'it must be {"messages": [{"role": "user", "content": "..."}]}, or the list alone'


def read_messages(path: Path, system: str | None = None) -> list[Conversation]:
    """The conversations of a file; `system` goes before those that have no system message."""
    if path.suffix not in (".json", ".jsonl"):
        raise ConfigError(f"--messages is {str(path)!r}; it must be a .json or .jsonl file.")
    try:
        text = read_bounded(path, LARGEST_BYTES).decode("utf-8-sig")
    except OSError as problem:
        raise ConfigError(f"--messages: {path}: {problem.strerror or problem}.") from None
    except ValueError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}.") from None
    conversations = [conversation_of(value, where, system) for value, where in _values(text, path)]
    if not conversations:
        raise DataError(f"{path}: no conversation; {SHAPE}.")
    return conversations


def as_messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Turns of plain text in OpenAI's shape."""
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def _values(text: str, path: Path) -> Iterator[tuple[Any, str]]:
    """Each conversation as JSON, and where it stands."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _json(line, f"{path}:{number}"), f"{path}:{number}"
        return
    # A list of messages is one conversation, any other list holds several.
    value = _json(text, str(path))
    if isinstance(value, list) and not any(
        isinstance(item, dict) and "role" in item for item in value
    ):
        yield from ((item, f"{path}[{number}]") for number, item in enumerate(value))
    else:
        yield value, str(path)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {' '.join(str(error).split())[:200]}.") from None


def conversation_of(value: Any, place: str, system: str | None) -> Conversation:
    """The conversation of one JSON value; `place` is what messages call it."""
    if isinstance(value, dict):
        record = value
    else:
        record = {"messages": value}
    if not isinstance(record.get("messages"), list):
        raise DataError(f"{place}: not a conversation; {SHAPE}.")
    # The same reader as for training data, so that both accept the same shapes.
    turns = TurnReader().turns(record["messages"], f"{place}: messages")
    if turns[-1].role == "assistant":
        raise DataError(
            f"{place}: the last message is the assistant's, so nothing waits for an answer. Leave "
            "it out."
        )
    if system is not None:
        if turns[0].role == "system":
            raise ConfigError(
                f"--system is given, but {place} has a system message. Leave one of them out."
            )
        turns.insert(0, Turn("system", system))
    return Conversation(tuple(turns), tools_of(record.get("tools"), place))

"""Is everything a conversation holds in the text a template wrote? In: turns and tools as the template got them, and its text.

A template may leave out what it has no place for: tool calls, tool definitions, tool turns, a system prompt. Then a model would learn
an empty answer, or an answer to something it never saw. Contents are looked for between the answers around them, calls inside their answer,
tools outside of all answers; a text counts as written as it is, or as JSON spells it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from headway.errors import DataError

Message = Mapping[str, Any]
Span = tuple[int, int]


def check_written(name: str, text: str, messages: Sequence[Message], tools: Sequence[Message], answers: Mapping[int, Span]) -> None:
    """Refuse a text in which something is missing; `answers`: the span of each turn the assistant said, if they are known."""
    start = 0
    for number, message in enumerate(messages):
        if number in answers:
            start, stop = answers[number]
            _check_answer(name, number, message, text[start:stop])
            start = stop
        elif message["role"] != "assistant":
            stop = next((answers[later][0] for later in sorted(answers) if later > number), len(text))
            first = number == 0 and message["role"] == "system"
            found = _find(str(message["content"]), text, 0 if first else start, len(text) if first else stop)
            if found is None:
                _refuse(name, f"turn {number} ({message['role']})")
            start = start if first else found
    outside = _without(text, sorted(answers.values()))
    for tool in tools:
        for word in _tool_words(tool):
            if not any(form in outside for form in _forms(word)):
                _refuse(name, f"the tool definitions ({word[:40]!r})")


def _check_answer(name: str, number: int, message: Message, answer: str) -> None:
    if _find(str(message["content"]), answer, 0, len(answer)) is None:
        _refuse(name, f"what the assistant says in turn {number}")
    for call in message.get("tool_calls", ()):
        function = call["function"]
        for value in (function["name"], *_values(function["arguments"])):
            if not any(form in answer for form in _forms(value)):
                _refuse(name, f"the tool call in turn {number} ({function['name']})")


def _refuse(name: str, what: str) -> NoReturn:
    raise DataError(
        f"chat template {name} does not write {what}, so it would be lost. Choose a template that has a place for it "
        "(chatml and qwen write tools and calls), or remove it from the data."
    )


def _find(content: str, text: str, start: int, stop: int) -> int | None:
    """Where a content ends in a stretch of text, as it is or as JSON spells it; None: it is not there."""
    for form in _forms(content):
        at = text.find(form, start, stop)
        if at >= 0:
            return at + len(form)
    return None


def _forms(value: Any) -> tuple[str, ...]:
    """How a template may write a value."""
    if isinstance(value, str):
        inner = value.strip()
        return tuple(dict.fromkeys((inner, json.dumps(inner, ensure_ascii=False)[1:-1], json.dumps(inner)[1:-1], repr(inner)[1:-1])))
    return tuple(dict.fromkeys((json.dumps(value), str(value))))


def _values(value: Any) -> Iterator[Any]:
    """The names and values in a call's arguments; null may be left out."""
    if isinstance(value, dict):
        for key, one in cast(dict[str, Any], value).items():
            yield key
            yield from _values(one)
    elif isinstance(value, list):
        for one in cast(list[Any], value):
            yield from _values(one)
    elif value is not None:
        yield value


def _tool_words(tool: Any) -> Iterator[str]:
    """What a model must know of a tool: names and descriptions, of the tool, its parameters and their choices."""
    if isinstance(tool, list):
        for one in cast(list[Any], tool):
            yield from _tool_words(one)
    if not isinstance(tool, dict):
        return
    for key, value in cast(dict[str, Any], tool).items():
        if key in ("name", "description") and isinstance(value, str):
            yield value
        elif key == "enum" and isinstance(value, list):
            yield from (one for one in cast(list[Any], value) if isinstance(one, str))
        elif key == "properties" and isinstance(value, dict):
            for parameter, one in cast(dict[str, Any], value).items():
                yield parameter
                yield from _tool_words(one)
        else:
            yield from _tool_words(value)


def _without(text: str, spans: Sequence[Span]) -> str:
    """The text without some stretches of it."""
    kept, at = [], 0
    for start, stop in spans:
        kept.append(text[at:start])
        at = max(at, stop)
    return "\0".join([*kept, text[at:]])

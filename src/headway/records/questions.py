"""Questions and answers of a record as turns, and what any conversation must satisfy; the kinds of conversations share it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headway.errors import DataError
from headway.records.parse_turns import Object, TurnReader, make_turn, text_of, transcript_of
from headway.text.record_keys import Fields, is_empty
from headway.tokenizer.chat_template import Turn

BINARY = {"true": True, "false": False, "1": True, "0": False}
"""The spellings of a label."""


def question_turns(key: str, fields: Fields, reader: TurnReader) -> list[Turn]:
    """The turns before the answer: the history, the question, and its context."""
    place, given = fields.place, fields.take(key)
    turns = reader.history(fields.take("history"), f"{place}: history")
    if isinstance(given, list):
        return [*turns, *reader.turns(given, f"{place}: {key}")]
    text = text_of(given, f"{place}: {key}")
    transcript = transcript_of(text)
    if transcript is not None and transcript.is_open:
        return [*turns, *transcript.turns]
    context_key = fields.first([name for name in ("input", "context") if name != key])
    context = fields.take(context_key)
    context_text = "" if is_empty(context) else text_of(context, f"{place}: {context_key}")
    return [
        *turns,
        Turn("user", text, context_text) if text.strip() else Turn("user", context_text),
    ]


def answer_turns(
    given: Any, where: str, reader: TurnReader, may_be_transcript: bool = False
) -> list[Turn]:
    """The turns of an answer, or of a whole dialogue that ends with one."""
    transcript = (
        transcript_of(text_of(given, where))
        if may_be_transcript and isinstance(given, str)
        else None
    )
    if transcript is not None and not transcript.is_open:
        return transcript.turns
    if transcript is not None:
        place, _, key = where.rpartition(": ")
        raise DataError(f"{place}: {empty_answer(key, ': the text ends with `Assistant:`')}")
    if isinstance(given, (list, dict)):
        return reader.turns(given if isinstance(given, list) else [given], where)
    return [make_turn("assistant", given, where)]


def unread_keys(fields: Fields, reader: TurnReader, turns: Iterable[Turn]) -> tuple[str, ...]:
    texts = {text.strip() for turn in turns for text in (turn.content, turn.context)}
    return (*fields.unread(texts), *reader.unread)


def empty_answer(key: str, detail: str = "") -> str:
    return f"{key} is an empty answer{detail}. Leave such records out with --drop-bad (in a recipe drop_bad: true)."


def says_nothing(turn: Turn) -> bool:
    return not turn.content.strip() and not turn.calls


def refuse_empty(turns: list[Turn], place: str) -> None:
    for number, turn in enumerate(turns):
        if turn.role in ("user", "assistant") and says_nothing(turn):
            raise DataError(f"{place}: turn {number} ({turn.role}) is empty.")


def refuse_bad_unicode(turns: list[Turn], tools: tuple[Object, ...], place: str) -> None:
    """Refuse calls and tools that are not valid Unicode; texts were checked when they were read."""
    calls = [[call.name, call.arguments] for turn in turns for call in turn.calls]
    if not calls and not tools:
        return
    try:
        json.dumps([calls, list(tools)], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{place}: a tool call or definition has a lone surrogate, which is not valid Unicode."
        ) from None
    except (TypeError, RecursionError, ValueError) as error:
        raise DataError(
            f"{place}: a tool call or definition cannot be written as JSON: {error}."
        ) from None

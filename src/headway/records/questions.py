"""Questions and answers of a record as turns, and checks that every conversation must pass.

The kinds chat, preference and unpaired share these functions. In: `Fields` (the values of a record
by name) and a `TurnReader`. Out: turns, or a DataError with file, line and key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headway.errors import DataError
from headway.records.parse_turns import Object, TurnReader, make_turn, text_of, transcript_of
from headway.text.record_keys import Fields, is_empty
from headway.tokenizer.chat_template import Turn

BINARY = {"true": True, "false": False, "1": True, "0": False}
"""The spellings of a label, as lower-case text: JSON booleans, CSV texts and 0/1 columns."""


def question_turns(key: str, fields: Fields, reader: TurnReader) -> list[Turn]:
    """The turns before the answer: the history, the question, and its context.

    `key` names the question. Alpaca's `input` beside an `instruction` is the context of the
    question, which a template may write in a section of its own.
    """
    location = fields.place
    content = fields.take(key)
    turns = reader.history(fields.take("history"), f"{location}: history")

    if isinstance(content, list):
        return [*turns, *reader.turns(content, f"{location}: {key}")]

    text = text_of(content, f"{location}: {key}")
    transcript = transcript_of(text)
    # A closed transcript already has the answer, so it cannot be a question: it stays one text.
    if transcript is not None and transcript.is_open:
        return [*turns, *transcript.turns]

    context_key = fields.first([name for name in ("input", "context") if name != key])
    context = fields.take(context_key)
    context_text = ""
    if not is_empty(context):
        context_text = text_of(context, f"{location}: {context_key}")

    # With an empty instruction the context is the question.
    if not text.strip():
        return [*turns, Turn("user", context_text)]
    return [*turns, Turn("user", text, context_text)]


def answer_turns(
    content: Any, where: str, reader: TurnReader, may_be_transcript: bool = False
) -> list[Turn]:
    """The turns of an answer, or of a whole dialogue that ends with one.

    `may_be_transcript`: the record has no prompt of its own, so a "Human: ... Assistant: ..." text
    is the dialogue (hh-rlhf). With a prompt the same text is an answer that quotes a dialogue.
    """
    transcript = None
    if may_be_transcript and isinstance(content, str):
        transcript = transcript_of(text_of(content, where))
    if transcript is not None and not transcript.is_open:
        return transcript.turns
    if transcript is not None:
        location, _, key = where.rpartition(": ")
        raise DataError(f"{location}: {empty_answer(key, ': the text ends with `Assistant:`')}")
    if isinstance(content, (list, dict)):
        return reader.turns(content if isinstance(content, list) else [content], where)

    return [make_turn("assistant", content, where)]


def unread_keys(fields: Fields, reader: TurnReader, turns: Iterable[Turn]) -> tuple[str, ...]:
    """The unread keys of a record and of its turns; refuses unread content that is not in `turns`.

    Call it last: only then is known which keys were read.
    """
    texts = {text.strip() for turn in turns for text in (turn.content, turn.context)}
    return (*fields.unread(texts), *reader.unread)


def empty_answer(key: str, detail: str = "") -> str:
    """The message about an empty answer."""
    return (
        f"{key} is an empty answer{detail}. Leave such records out with --drop-bad (in a recipe "
        "drop_bad: true)."
    )


def says_nothing(turn: Turn) -> bool:
    """Whether a turn has neither text nor tool calls."""
    return not turn.content.strip() and not turn.calls


def refuse_empty(turns: list[Turn], place: str) -> None:
    """Refuse turns of the user or the assistant without content; a tool may return nothing."""
    for number, turn in enumerate(turns):
        if turn.role in ("user", "assistant") and says_nothing(turn):
            raise DataError(f"{place}: turn {number} ({turn.role}) is empty.")


def refuse_bad_unicode(turns: list[Turn], tools: tuple[Object, ...], place: str) -> None:
    """Refuse calls and tools that are not valid Unicode; texts were checked when they were read."""
    calls = [[call.name, call.arguments] for turn in turns for call in turn.calls]
    if not calls and not tools:
        return

    # One dump finds lone surrogates at any depth, and values that no template could write.
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

"""Parses records of chat and preference data, in any known shape, into conversations and preference pairs.

    turns           messages | conversations | conversation | items | dialogue | dialog: [{role, content} | {from, value} | ..., ...]
    one question    instruction | prompt | question | query | problem | input, and
                    output | response | completion | answer | target | solution (and input or context, system, history);
                    a question or answer may be a list of turns, or a "Human: ... Assistant:" text
    MOSS            chat: {turn_1: {...}} | plain_text, with meta_instruction or prefix
    preference      chosen, rejected: answers to a prompt in any of the forms above, or whole dialogues with the same beginning
    unpaired        label | kto_tag: true or false, of the answer in any of the forms above, or of a whole dialogue's last answer

In: a `Record`, and the user's names for keys (`text/record_keys.py`). Out: a `Conversation`, a `PreferencePair` or a `LabelledAnswer`. A
missing value, one of another type, and content under a key that the shape does not read are DataErrors with file, line and key. Other
unread keys are in `unread`. Lists of turns are parsed in `parse_turns.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DataError
from headway.prepare.parse_turns import (
    Object,
    TurnReader,
    make_turn,
    moss_chat,
    moss_text,
    text_of,
    tools_of,
    transcript_of,
    with_system,
)
from headway.text.document import Record
from headway.text.record_keys import (
    ANSWERS,
    LABELS,
    LISTS,
    PAIR,
    QUESTIONS,
    SYSTEMS,
    TOOLS,
    Fields,
    KeyMap,
    is_empty,
)
from headway.tokenizer.chat_template import Turn

SHAPES = (
    "Alpaca (instruction, output), ShareGPT (conversations), OpenAI (messages), InternLM (conversation), MOSS (chat, plain_text), a prompt "
    "or question with a response, completion or answer; any other with --keys (in a recipe keys)"
)
PAIR_SHAPES = "prompt, chosen and rejected; chosen and rejected as message lists or Human/Assistant texts; conversations, chosen and rejected"
UNPAIRED_SHAPES = (
    "prompt, completion and label (true or false); or a whole conversation (messages) and label"
)
BINARY = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class Conversation:
    """Turns, and the tools the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Unread keys of the record; none of them is known to carry content."""


@dataclass(frozen=True)
class PreferencePair:
    """A prompt and two answers to it; an answer has several turns if it calls tools."""

    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class LabelledAnswer:
    """A prompt, an answer to it, and whether the answer is good."""

    prompt: tuple[Turn, ...]
    answer: tuple[Turn, ...]
    is_good: bool
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)


def parse_conversation(record: Record, keys: KeyMap = KeyMap()) -> Conversation:
    """The conversation of a record; at least one turn of the assistant must carry loss."""
    fields, reader = Fields(record, keys), TurnReader(keys)
    turns = _conversation(fields, reader)
    turns = with_system(turns, fields.take(fields.first(SYSTEMS)), fields.place)
    _check_label(fields)
    if not any(turn.role == "assistant" and turn.learn for turn in turns):
        raise DataError(f"{fields.place}: no turn of the assistant to learn from.")
    _no_empty(turns, fields.place)
    tools = tools_of(fields.take(fields.first(TOOLS)), fields.place)
    _check_unicode(turns, tools, fields.place)
    return Conversation(tuple(turns), tools, _unread(fields, reader, turns))


def parse_preference(record: Record, keys: KeyMap = KeyMap()) -> PreferencePair:
    """The preference pair of a record; chosen and rejected must differ."""
    fields, reader = Fields(record, keys), TurnReader(keys)
    place = fields.place
    missing = [key for key in PAIR if fields.peek(key) is None]
    if missing:
        raise DataError(
            f"{place}: no {' and no '.join(missing)}; its keys are {fields.keys}. Expected {PAIR_SHAPES}."
        )
    for key in PAIR:
        if is_empty(fields.peek(key)):
            raise DataError(f"{place}: {_empty_answer(key)}")
    has_prompt = fields.first((*LISTS, *QUESTIONS)) is not None
    answers = [
        _answer(fields.take(key), f"{place}: {key}", reader, may_be_transcript=not has_prompt)
        for key in PAIR
    ]
    if all(turns and turns[0].role != "assistant" for turns in answers):
        shared = _shared(*answers)
        prompt, answers = answers[0][:shared], [turns[shared:] for turns in answers]
        if not prompt:
            raise DataError(
                f"{place}: chosen and rejected are whole dialogues that share no first turns. Expected {PAIR_SHAPES}."
            )
    else:
        prompt = _prompt(fields, reader)
        _no_empty(prompt, place)
    prompt = with_system(prompt, fields.take(fields.first(SYSTEMS)), place)
    for key, turns in zip(PAIR, answers, strict=True):
        if not turns or turns[0].role != "assistant" or turns[-1].role != "assistant":
            raise DataError(f"{place}: {key} must be an answer of the assistant to the prompt.")
        if len(turns) == 1 and _says_nothing(turns[0]):
            raise DataError(f"{place}: {_empty_answer(key)}")
        _no_empty(turns, f"{place}: {key}")
    if answers[0] == answers[1]:
        raise DataError(f"{place}: chosen and rejected are the same.")
    if prompt[-1].role == "assistant":
        raise DataError(
            f"{place}: the prompt ends with the assistant; the turn to answer must come last."
        )
    tools = tools_of(fields.take(fields.first(TOOLS)), place)
    everything = [*prompt, *answers[0], *answers[1]]
    _check_unicode(everything, tools, place)
    return PreferencePair(
        tuple(prompt),
        tuple(answers[0]),
        tuple(answers[1]),
        tools,
        _unread(fields, reader, everything),
    )


def parse_unpaired(record: Record, keys: KeyMap = KeyMap()) -> LabelledAnswer:
    """The labelled answer of a record."""
    fields, reader = Fields(record, keys), TurnReader(keys)
    place, is_good = fields.place, label_of(fields)
    prompt, answer = _prompt_and_answer(fields, reader)
    if not prompt:
        raise DataError(f"{place}: the answer has no prompt. Expected {UNPAIRED_SHAPES}.")
    if not answer or answer[0].role != "assistant" or answer[-1].role != "assistant":
        raise DataError(f"{place}: the turns after the prompt must be an answer of the assistant.")
    prompt = with_system(prompt, fields.take(fields.first(SYSTEMS)), place)
    turns = [*prompt, *answer]
    _no_empty(turns, place)
    if prompt[-1].role == "assistant":
        raise DataError(
            f"{place}: the prompt ends with the assistant; the turn to answer must come last."
        )
    tools = tools_of(fields.take(fields.first(TOOLS)), place)
    _check_unicode(turns, tools, place)
    return LabelledAnswer(
        tuple(prompt), tuple(answer), is_good, tools, _unread(fields, reader, turns)
    )


def label_of(fields: Fields) -> bool:
    """Whether an answer is good: KTO's label."""
    key = fields.first(LABELS)
    if key is None:
        raise DataError(
            f"{fields.place}: no label; its keys are {fields.keys}. Expected {UNPAIRED_SHAPES}."
        )
    given = fields.take(key)
    value = BINARY.get(str(given).lower())
    if value is None:
        raise DataError(
            f"{fields.place}: {key} is {str(given)[:40]!r}; it must be true (a good answer) or false (a bad one)."
        )
    return value


def _prompt_and_answer(fields: Fields, reader: TurnReader) -> tuple[list[Turn], list[Turn]]:
    place = fields.place
    listed, question, key = fields.first(LISTS), fields.first(QUESTIONS), fields.first(ANSWERS)
    if listed is not None:
        turns = reader.turns(fields.take(listed), f"{place}: {listed}")
        if turns and turns[-1].role == "assistant":
            return _last_answer(turns)
        if key is None:
            raise DataError(
                f"{place}: {listed} ends without an answer of the assistant. Expected {UNPAIRED_SHAPES}."
            )
        return turns, _answer(fields.take(key), f"{place}: {key}", reader)
    if key is None:
        raise DataError(
            f"{place}: no answer; its keys are {fields.keys}. Expected {UNPAIRED_SHAPES}."
        )
    answer = _answer(
        fields.take(key), f"{place}: {key}", reader, may_be_transcript=question is None
    )
    if question is not None:
        return _question(question, fields, reader), answer
    return _last_answer(answer)


def _last_answer(turns: list[Turn]) -> tuple[list[Turn], list[Turn]]:
    """A whole dialogue, cut after the last turn of the user."""
    last = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=-1)
    return turns[: last + 1], turns[last + 1 :]


def _conversation(fields: Fields, reader: TurnReader) -> list[Turn]:
    place = fields.place
    listed, question = fields.first(LISTS), fields.first(QUESTIONS)
    if listed is not None:
        return reader.turns(fields.take(listed), f"{place}: {listed}")
    if fields.peek("chat") is not None:
        return moss_chat(fields.take("chat"), f"{place}: chat", reader.keys.ignored)
    if fields.peek("plain_text") is not None:
        return with_system(
            moss_text(fields.take("plain_text"), f"{place}: plain_text", reader.keys.ignored),
            fields.take("prefix"),
            place,
        )
    answer = fields.first(ANSWERS)
    if question is None:
        raise DataError(
            f"{place}: not a conversation; its keys are {fields.keys}. Expected {SHAPES}."
        )
    if answer is None:
        raise DataError(
            f"{place}: {question} without {', '.join(ANSWERS)}; its keys are {fields.keys}. Expected {SHAPES}."
        )
    return [
        *_question(question, fields, reader),
        *_answer(fields.take(answer), f"{place}: {answer}", reader),
    ]


def _prompt(fields: Fields, reader: TurnReader) -> list[Turn]:
    listed, question = fields.first(LISTS), fields.first(QUESTIONS)
    if listed is not None:
        return reader.turns(fields.take(listed), f"{fields.place}: {listed}")
    if question is None:
        raise DataError(
            f"{fields.place}: no prompt; its keys are {fields.keys}. Expected {PAIR_SHAPES}."
        )
    return _question(question, fields, reader)


def _question(key: str, fields: Fields, reader: TurnReader) -> list[Turn]:
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


def _answer(
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
        raise DataError(f"{place}: {_empty_answer(key, ': the text ends with `Assistant:`')}")
    if isinstance(given, (list, dict)):
        return reader.turns(given if isinstance(given, list) else [given], where)
    return [make_turn("assistant", given, where)]


def _shared(one: list[Turn], other: list[Turn]) -> int:
    """How many first turns two conversations share, up to the last shared turn that is not the assistant's."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    while count and one[count - 1].role == "assistant":
        count -= 1
    return count


def _check_label(fields: Fields) -> None:
    """Refuse an answer that KTO's label marks as bad. Any other label stays unread."""
    key = fields.first(LABELS)
    value = BINARY.get(str(fields.peek(key)).lower()) if key is not None else None
    if value is not None:
        fields.take(key)
    if value is False:
        raise DataError(
            f"{fields.place}: {key} is false, which marks a bad answer; learn from good and bad ones with objective kto (kind: unpaired), "
            f"drop such records with --drop-bad (in a recipe drop_bad: true), or train on them with --keys {key}=."
        )


def _unread(fields: Fields, reader: TurnReader, turns: Iterable[Turn]) -> tuple[str, ...]:
    texts = {text.strip() for turn in turns for text in (turn.content, turn.context)}
    return (*fields.unread(texts), *reader.unread)


def _empty_answer(key: str, detail: str = "") -> str:
    return f"{key} is an empty answer{detail}. Leave such records out with --drop-bad (in a recipe drop_bad: true)."


def _says_nothing(turn: Turn) -> bool:
    return not turn.content.strip() and not turn.calls


def _no_empty(turns: list[Turn], place: str) -> None:
    for number, turn in enumerate(turns):
        if turn.role in ("user", "assistant") and _says_nothing(turn):
            raise DataError(f"{place}: turn {number} ({turn.role}) is empty.")


def _check_unicode(turns: list[Turn], tools: tuple[Object, ...], place: str) -> None:
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

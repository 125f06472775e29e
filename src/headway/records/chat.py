"""Conversations, in any known shape.

    turns           messages | conversations | conversation | items | dialogue | dialog:
                    [{role, content} | {from, value} | ..., ...]
    one question    instruction | prompt | question | query | problem | input, and
                    output | response | completion | answer | target | solution
                    (and input or context, system, history);
                    a question or answer may be a list of turns, or a "Human: ... Assistant:" text
    MOSS            chat: {turn_1: {...}} | plain_text, with meta_instruction or prefix

In: a `Record`, and the user's names for keys (`text/record_keys.py`). Out: a `Conversation`,
then one document of ids and loss mask, truncated or dropped by `too_long`. A missing value, one
of another type, and content under a key that the shape does not read are DataErrors with file,
line and key. Other unread keys are in `unread`. Lists of turns are parsed in `parse_turns.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DataError
from headway.records.base import (
    DetectContext,
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    Fit,
    RecordFields,
    RecordKind,
    TooLong,
)
from headway.records.parse_turns import (
    Object,
    TurnReader,
    moss_chat,
    moss_text,
    tools_of,
    with_system,
)
from headway.records.questions import (
    BINARY,
    answer_turns,
    question_turns,
    refuse_bad_unicode,
    refuse_empty,
    unread_keys,
)
from headway.text.document import Record
from headway.text.record_keys import (
    ANSWERS,
    LABELS,
    LISTS,
    QUESTIONS,
    SYSTEMS,
    TOOLS,
    Fields,
    KeyMap,
)
from headway.tokenizer.chat import Rendered, Turn

SHAPES = (
    "Alpaca (instruction, output), ShareGPT (conversations), OpenAI (messages), InternLM "
    "(conversation), MOSS (chat, plain_text), a prompt or question with a response, completion or "
    "answer; any other with --keys (in a recipe keys)"
)


@dataclass(frozen=True)
class Conversation:
    """The example of this kind: turns, and the tools the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Unread keys of the record; none of them is known to carry content."""


def parse_conversation(record: Record, keys: KeyMap = KeyMap()) -> Conversation:
    """The conversation of a record; at least one turn of the assistant must carry loss."""
    fields = Fields(record, keys)
    reader = TurnReader(keys)
    turns = _conversation_turns(fields, reader)
    turns = with_system(turns, fields.take(fields.first(SYSTEMS)), fields.place)

    _refuse_bad_label(fields)
    if not any(turn.role == "assistant" and turn.learn for turn in turns):
        raise DataError(f"{fields.place}: no turn of the assistant to learn from.")

    refuse_empty(turns, fields.place)
    tools = tools_of(fields.take(fields.first(TOOLS)), fields.place)
    refuse_bad_unicode(turns, tools, fields.place)

    # The unread keys come last: `fields` knows only now what was read.
    return Conversation(tuple(turns), tools, unread_keys(fields, reader, turns))


def _conversation_turns(fields: Fields, reader: TurnReader) -> list[Turn]:
    """The turns of a record without its separate system prompt.

    The order decides for records that have several shapes: a list of turns is the whole
    conversation, and a question beside it only repeats a part of it.
    """
    location = fields.place
    list_key = fields.first(LISTS)
    question_key = fields.first(QUESTIONS)

    if list_key is not None:
        return reader.turns(fields.take(list_key), f"{location}: {list_key}")
    if fields.peek("chat") is not None:
        return moss_chat(fields.take("chat"), f"{location}: chat", reader.keys.ignored)

    if fields.peek("plain_text") is not None:
        return with_system(
            moss_text(fields.take("plain_text"), f"{location}: plain_text", reader.keys.ignored),
            fields.take("prefix"),
            location,
        )

    answer_key = fields.first(ANSWERS)
    if question_key is None:
        raise DataError(
            f"{location}: not a conversation; its keys are {fields.keys}. Expected {SHAPES}."
        )

    if answer_key is None:
        raise DataError(
            f"{location}: {question_key} without {', '.join(ANSWERS)}; its keys are "
            f"{fields.keys}. Expected {SHAPES}."
        )

    return [
        *question_turns(question_key, fields, reader),
        *answer_turns(fields.take(answer_key), f"{location}: {answer_key}", reader),
    ]


def _refuse_bad_label(fields: Fields) -> None:
    """Refuse an answer that KTO's label marks as bad.

    Any other value under `label` (a class, a topic) is not KTO's: it stays unread and is reported.
    """
    key = fields.first(LABELS)
    value = None
    if key is not None:
        value = BINARY.get(str(fields.peek(key)).lower())
    # Taken, so that a label that is understood is not reported as unread.
    if value is not None:
        fields.take(key)

    if value is False:
        raise DataError(
            f"{fields.place}: {key} is false, which marks a bad answer; learn from good and bad "
            "ones with objective kto (kind: unpaired), drop such records with --drop-bad (in a "
            f"recipe drop_bad: true), or train on them with --keys {key}=."
        )


@dataclass(frozen=True)
class ChatEncoder:
    """One record becomes one document.

    The repr of this class is part of cache keys: do not rename it or its fields.
    """

    max_length: int | None
    too_long: TooLong
    keys: KeyMap = KeyMap()

    def documents(
        self, example: Any, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """The conversation as ids and loss mask.

        A conversation left without a target is dropped and counted.
        """
        ids, mask = rendered[0]
        counts = context.counts
        if self.max_length is not None and len(ids) > self.max_length:
            if self.too_long == "drop":
                counts["dropped"] += 1
                return []

            counts["truncated"] += 1

            kept = slice(self.max_length)
            if self.too_long == "truncate_left":
                kept = slice(-self.max_length, None)

            ids = ids[kept]
            mask = mask[kept]

        # The first token is predicted from nothing, so a target there does not train anything.
        if not mask[1:].any():
            counts["without_targets"] += 1
            return []

        return [EncodedDocument(ids, mask)]


class Kind(RecordKind):
    """Conversations; loss is on the assistant's turns."""

    may_drop_long = True

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        # A key that the user mapped is a list of turns whatever its type: parsing then says what is
        # wrong with it. An unmapped one must be a list, because `items` or `dialogue` may hold
        # anything.
        turns = context.first(data, LISTS)
        if turns is not None and (turns in context.names or isinstance(data.get(turns), list)):
            return Fit((turns,), 1)
        if isinstance(data.get("chat"), dict):
            return Fit(("chat",), 1)
        if isinstance(data.get("plain_text"), str):
            return Fit(("plain_text",), 1)

        question = context.first(data, QUESTIONS)
        answer = context.first(data, ANSWERS)
        if question is not None and answer is not None:
            return Fit((question, answer), 1)

        return None

    def parse(self, record: Record, fields: RecordFields) -> Conversation:
        return parse_conversation(record, fields.keys)

    def conversations(self, example: Conversation) -> list[list[Turn]]:
        return [list(example.turns)]

    def encoder(self, settings: DocumentSettings) -> ChatEncoder:
        return ChatEncoder(settings.max_length, settings.too_long, settings.keys)

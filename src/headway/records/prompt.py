"""Prompts that a model answers itself while it trains (objective grpo).

    turns           messages | conversations | ...: the turns up to the first answer that is wanted
    one question    prompt | question | problem | ..., a text or a list of turns

All other columns are kept as they are: rewards read them (the right answer, tests, a category).
Prompts become no documents of a token store: `rollout/prompts.py` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DataError
from headway.records.base import DetectContext, Fit, RecordFields, RecordKind, ShownPart
from headway.records.parse_turns import Object, TurnReader, tools_of, with_system
from headway.records.questions import question_turns, refuse_bad_unicode, refuse_empty
from headway.text.document import Record
from headway.text.record_keys import LISTS, QUESTIONS, SYSTEMS, TOOLS, Fields, KeyMap
from headway.tokenizer.chat_template import Turn

PROMPT_SCORE = 4
"""Above pairs: where a task answers prompts itself, the answers of a record are columns."""


@dataclass(frozen=True)
class Prompt:
    """The example of this kind: turns before an answer."""

    turns: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Always empty: rewards may read every column."""


def parse_prompt(record: Record, keys: KeyMap = KeyMap()) -> Prompt:
    """The prompt of a record. Answers at the end of a list of turns are not part of it."""
    fields = Fields(record, keys)
    reader = TurnReader(keys)
    list_key = fields.first(LISTS)
    question_key = fields.first(QUESTIONS)
    if list_key is not None:
        turns = reader.turns(fields.take(list_key), f"{fields.place}: {list_key}")
        while turns and turns[-1].role == "assistant":
            turns.pop()
    elif question_key is not None:
        turns = question_turns(question_key, fields, reader)
    else:
        raise DataError(
            f"{fields.place}: no prompt; its keys are {fields.keys}. Expected one of "
            f"{', '.join((*QUESTIONS, *LISTS))}; any other with keys (data.train.0.keys)."
        )

    turns = with_system(turns, fields.take(fields.first(SYSTEMS)), fields.place)
    if not any(turn.role == "user" for turn in turns):
        raise DataError(f"{fields.place}: no turn of the user to answer.")
    refuse_empty(turns, fields.place)
    tools = tools_of(fields.take(fields.first(TOOLS)), fields.place)
    refuse_bad_unicode(turns, tools, fields.place)
    return Prompt(tuple(turns), tools)


class Kind(RecordKind):
    """Prompts; answers are sampled."""

    mark = None
    unit = "prompts"
    content = "prompts"
    has_tokens = False
    targets = ()
    recipe = None
    large_recipe = None

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        # For any other task such a record is a conversation, a pair or a labelled answer.
        if self.name not in context.reads:
            return None
        key = context.first(data, LISTS) or context.first(data, QUESTIONS)
        if key is None:
            return None
        return Fit((key,), PROMPT_SCORE)

    def parse(self, record: Record, fields: RecordFields) -> Prompt:
        return parse_prompt(record, fields.keys)

    def conversations(self, example: Prompt) -> list[list[Turn]]:
        return [list(example.turns)]

    def show(self, example: Prompt) -> list[list[ShownPart]]:
        return [[ShownPart(turn.role, turn.content, False) for turn in example.turns]]

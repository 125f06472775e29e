"""Preference pairs: a prompt and two answers to it, one of them preferred.

    chosen, rejected    answers to a prompt in any form of chat.py, or whole dialogues with the same beginning

A record becomes two documents with the same prompt. A missing value, one of another type and unread content are DataErrors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from headway.errors import DataError
from headway.records.base import (
    HEADWAY_ONLY,
    DetectContext,
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    Fit,
    RecordFields,
    RecordKind,
)
from headway.records.parse_turns import Object, TurnReader, tools_of, with_system
from headway.records.questions import (
    answer_turns,
    empty_answer,
    question_turns,
    refuse_bad_unicode,
    refuse_empty,
    says_nothing,
    unread_keys,
)
from headway.store.source import Ids
from headway.text.document import Record
from headway.text.record_keys import (
    LISTS,
    PAIR,
    QUESTIONS,
    SYSTEMS,
    TOOLS,
    Fields,
    KeyMap,
    is_empty,
)
from headway.tokenizer.chat import Rendered, Turn

PREFERENCE_MARK = "kind=preference"
"""Starts the first `sources` entry in the manifest of a preference store."""
PAIR_SHAPES = "prompt, chosen and rejected; chosen and rejected as message lists or Human/Assistant texts; conversations, chosen and rejected"


@dataclass(frozen=True)
class PreferencePair:
    """A prompt and two answers to it; an answer has several turns if it calls tools."""

    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)


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
            raise DataError(f"{place}: {empty_answer(key)}")
    has_prompt = fields.first((*LISTS, *QUESTIONS)) is not None
    answers = [
        answer_turns(fields.take(key), f"{place}: {key}", reader, may_be_transcript=not has_prompt)
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
        prompt = prompt_turns(fields, reader)
        refuse_empty(prompt, place)
    prompt = with_system(prompt, fields.take(fields.first(SYSTEMS)), place)
    for key, turns in zip(PAIR, answers, strict=True):
        if not turns or turns[0].role != "assistant" or turns[-1].role != "assistant":
            raise DataError(f"{place}: {key} must be an answer of the assistant to the prompt.")
        if len(turns) == 1 and says_nothing(turns[0]):
            raise DataError(f"{place}: {empty_answer(key)}")
        refuse_empty(turns, f"{place}: {key}")
    if answers[0] == answers[1]:
        raise DataError(f"{place}: chosen and rejected are the same.")
    if prompt[-1].role == "assistant":
        raise DataError(
            f"{place}: the prompt ends with the assistant; the turn to answer must come last."
        )
    tools = tools_of(fields.take(fields.first(TOOLS)), place)
    everything = [*prompt, *answers[0], *answers[1]]
    refuse_bad_unicode(everything, tools, place)
    return PreferencePair(
        tuple(prompt),
        tuple(answers[0]),
        tuple(answers[1]),
        tools,
        unread_keys(fields, reader, everything),
    )


def prompt_turns(fields: Fields, reader: TurnReader) -> list[Turn]:
    listed, question = fields.first(LISTS), fields.first(QUESTIONS)
    if listed is not None:
        return reader.turns(fields.take(listed), f"{fields.place}: {listed}")
    if question is None:
        raise DataError(
            f"{fields.place}: no prompt; its keys are {fields.keys}. Expected {PAIR_SHAPES}."
        )
    return question_turns(question, fields, reader)


def _shared(one: list[Turn], other: list[Turn]) -> int:
    """How many first turns two conversations share, up to the last shared turn that is not the assistant's."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    while count and one[count - 1].role == "assistant":
        count -= 1
    return count


@dataclass(frozen=True)
class PairEncoder:
    """One record becomes two documents: chosen (2i) and rejected (2i + 1). The repr is part of cache keys: do not rename it or its fields.

    The prompt carries no loss, not even its assistant turns. The answers do, including the token that ends them. A pair longer than
    `max_length` first loses the beginning of its prompt, down to `max_prompt_length` tokens, then the ends of its answers.
    """

    max_length: int | None
    max_prompt_length: int
    keys: KeyMap = KeyMap()

    def documents(
        self, example: Any, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """Both conversations as ids and loss mask, with the same prompt."""
        return self.fitted(rendered, context.counts)

    def fitted(self, rendered: list[Rendered], counts: Counter[str]) -> list[EncodedDocument]:
        """Both conversations, truncated where they are too long."""
        prompt, *answers = split_pair(*rendered)
        return fit_answers(prompt, answers, self, counts)


class AnswerLimits(Protocol):
    """How long a prompt with an answer may be."""

    @property
    def max_length(self) -> int | None: ...

    @property
    def max_prompt_length(self) -> int: ...


def fit_answers(
    prompt: Ids, answers: Sequence[Rendered], limits: AnswerLimits, counts: Counter[str]
) -> list[EncodedDocument]:
    """The prompt with each answer, as ids and loss mask, truncated where they are too long."""
    longest = max(len(answer.ids) for answer in answers)
    start = 0
    room = longest
    if limits.max_length is not None and len(prompt) + longest > limits.max_length:
        kept = min(len(prompt), max(limits.max_prompt_length, limits.max_length - longest))
        start = len(prompt) - kept
        room = limits.max_length - kept
        counts["prompts_truncated"] += start > 0
        counts["answers_truncated"] += longest > room
    no_loss = np.zeros(len(prompt) - start, np.bool_)
    return [
        EncodedDocument(
            np.concatenate([prompt[start:], answer.ids[:room]]),
            np.concatenate([no_loss, answer.mask[:room]]),
        )
        for answer in answers
    ]


def split_pair(chosen: Rendered, rejected: Rendered) -> tuple[Ids, Rendered, Rendered]:
    """The prompt both share (with the header of the answer), and the two answers up to their last target."""
    (prompt, good), (other, bad) = split_answer(chosen), split_answer(rejected)
    if not np.array_equal(prompt, other):
        raise DataError(
            "the template writes the prompt differently before the two answers, so they cannot be compared."
        )
    return prompt, good, bad


def split_answer(rendered: Rendered) -> tuple[Ids, Rendered]:
    """The prompt with the header of the answer, and the answer up to its last target."""
    first = int(np.argmax(rendered.mask))
    end = len(rendered.mask) - int(np.argmax(rendered.mask[::-1]))
    return rendered.ids[:first], Rendered(rendered.ids[first:end], rendered.mask[first:end])


def with_loss_on_answer(prompt: Sequence[Turn], answer: Sequence[Turn]) -> list[Turn]:
    """A conversation with loss on its answer alone."""
    return [
        *(replace(turn, learn=False) for turn in prompt),
        *(replace(turn, learn=True) for turn in answer),
    ]


class Kind(RecordKind):
    """Pairs of answers; loss is on both."""

    mark = PREFERENCE_MARK
    unit = "pairs"
    content = "preference pairs"
    counted = "pairs"
    left_out = ("prompts_truncated", "answers_truncated", "bad")
    shows_share = False
    documents = 2
    least_length = 4
    targets = HEADWAY_ONLY
    recipe = "dpo"
    large_recipe = "dpo"

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        if not all(context.first(data, (name,)) for name in PAIR):
            return None
        question = context.first(data, QUESTIONS)
        if question is None:
            return Fit(PAIR, 3)
        return Fit((question, *PAIR), 3)

    def parse(self, record: Record, fields: RecordFields) -> PreferencePair:
        return parse_preference(record, fields.keys)

    def conversations(self, example: PreferencePair) -> list[list[Turn]]:
        return [
            with_loss_on_answer(example.prompt, answer)
            for answer in (example.chosen, example.rejected)
        ]

    def encoder(self, settings: DocumentSettings) -> PairEncoder:
        return PairEncoder(settings.max_length, kept_prompt(settings), settings.keys)

    def max_length(self, seq_len: int, packing: str, reads: tuple[str, ...]) -> int | None:
        # A row holds both answers of a pair, unless the task learns each of them by itself.
        if self.is_stand_in(reads):
            return seq_len
        return seq_len // 2


def kept_prompt(settings: DocumentSettings) -> int:
    """Tokens of a prompt that truncation leaves in any case."""
    return settings.max_prompt_length or max(1, (settings.max_length or 0) // 2)

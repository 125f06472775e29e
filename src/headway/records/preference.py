"""Preference pairs: a prompt and two answers to it, one of them preferred.

    {"prompt": "Hi", "chosen": "Hello!", "rejected": "Go away."}
        -> document 2i     [prompt][header] Hello!    loss on the answer
           document 2i+1   [prompt][header] Go away.  loss on the answer

`chosen` and `rejected` are answers to a prompt in any form of chat.py, or whole dialogues with the
same first turns (hh-rlhf), which then are the prompt. A missing value, one of another type and
unread content are DataErrors.
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
    PREFERENCE_MARK,
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

PAIR_SHAPES = (
    "prompt, chosen and rejected; chosen and rejected as message lists or Human/Assistant texts; "
    "conversations, chosen and rejected"
)


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
    fields = Fields(record, keys)
    reader = TurnReader(keys)
    location = fields.place

    missing = [key for key in PAIR if fields.peek(key) is None]
    if missing:
        raise DataError(
            f"{location}: no {' and no '.join(missing)}; its keys are {fields.keys}. Expected "
            f"{PAIR_SHAPES}."
        )

    for key in PAIR:
        if is_empty(fields.peek(key)):
            raise DataError(f"{location}: {empty_answer(key)}")

    # Without a prompt, chosen and rejected must bring it: as whole dialogues.
    has_prompt = fields.first((*LISTS, *QUESTIONS)) is not None
    answers = [
        answer_turns(
            fields.take(key), f"{location}: {key}", reader, may_be_transcript=not has_prompt
        )
        for key in PAIR
    ]

    # Both begin with somebody else than the assistant: whole dialogues, of which the shared first
    # turns are the prompt.
    if all(turns and turns[0].role != "assistant" for turns in answers):
        num_shared = _shared(*answers)
        prompt = answers[0][:num_shared]
        answers = [turns[num_shared:] for turns in answers]
        if not prompt:
            raise DataError(
                f"{location}: chosen and rejected are whole dialogues that share no first turns. "
                f"Expected {PAIR_SHAPES}."
            )
    else:
        prompt = prompt_turns(fields, reader)
        refuse_empty(prompt, location)

    prompt = with_system(prompt, fields.take(fields.first(SYSTEMS)), location)

    # An answer may have several turns (a call, the tool's result, the reply), but begins and ends
    # with the assistant.
    for key, turns in zip(PAIR, answers, strict=True):
        if not turns or turns[0].role != "assistant" or turns[-1].role != "assistant":
            raise DataError(f"{location}: {key} must be an answer of the assistant to the prompt.")
        if len(turns) == 1 and says_nothing(turns[0]):
            raise DataError(f"{location}: {empty_answer(key)}")

        refuse_empty(turns, f"{location}: {key}")

    if answers[0] == answers[1]:
        raise DataError(f"{location}: chosen and rejected are the same.")

    if prompt[-1].role == "assistant":
        raise DataError(
            f"{location}: the prompt ends with the assistant; the turn to answer must come last."
        )

    tools = tools_of(fields.take(fields.first(TOOLS)), location)
    all_turns = [*prompt, *answers[0], *answers[1]]
    refuse_bad_unicode(all_turns, tools, location)
    return PreferencePair(
        tuple(prompt),
        tuple(answers[0]),
        tuple(answers[1]),
        tools,
        unread_keys(fields, reader, all_turns),
    )


def prompt_turns(fields: Fields, reader: TurnReader) -> list[Turn]:
    """The prompt of a record whose answers are no whole dialogues."""
    list_key = fields.first(LISTS)
    question_key = fields.first(QUESTIONS)
    if list_key is not None:
        return reader.turns(fields.take(list_key), f"{fields.place}: {list_key}")
    if question_key is None:
        raise DataError(
            f"{fields.place}: no prompt; its keys are {fields.keys}. Expected {PAIR_SHAPES}."
        )
    return question_turns(question_key, fields, reader)


def _shared(first: list[Turn], second: list[Turn]) -> int:
    """How many first turns two conversations share, up to the last shared turn that is not the
    assistant's: a prompt ends with the turn to answer, so a shared reply belongs to the answers.
    """
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    while count and first[count - 1].role == "assistant":
        count -= 1
    return count


@dataclass(frozen=True)
class PairEncoder:
    """One record becomes two documents: chosen (2i) and rejected (2i + 1).

    The repr is part of cache keys: do not rename it or its fields.

    The prompt carries no loss, not even its assistant turns. The answers do, including the token
    that ends them. A pair longer than `max_length` first loses the beginning of its prompt, down
    to `max_prompt_length` tokens, then the ends of its answers.
    """

    max_length: int | None
    max_prompt_length: int
    keys: KeyMap = KeyMap()
    """Not read here; it is part of the repr, because other keys give other documents."""

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
    """How long a prompt with an answer may be; the encoders of pairs and of labelled answers."""

    @property
    def max_length(self) -> int | None: ...

    @property
    def max_prompt_length(self) -> int: ...


def fit_answers(
    prompt: Ids, answers: Sequence[Rendered], limits: AnswerLimits, counts: Counter[str]
) -> list[EncodedDocument]:
    """The prompt with each answer, as ids and loss mask, truncated where they are too long.

    All answers keep the same prompt, cut for the longest of them: a comparison of answers to
    different prompts would mean nothing. The prompt loses its beginning, so that the question
    stays beside the answer.
    """
    longest = max(len(answer.ids) for answer in answers)
    prompt_start = 0
    answer_room = longest

    if limits.max_length is not None and len(prompt) + longest > limits.max_length:
        prompt_length = min(len(prompt), max(limits.max_prompt_length, limits.max_length - longest))
        prompt_start = len(prompt) - prompt_length
        answer_room = limits.max_length - prompt_length

        counts["prompts_truncated"] += prompt_start > 0
        counts["answers_truncated"] += longest > answer_room

    no_loss = np.zeros(len(prompt) - prompt_start, np.bool_)
    return [
        EncodedDocument(
            np.concatenate([prompt[prompt_start:], answer.ids[:answer_room]]),
            np.concatenate([no_loss, answer.mask[:answer_room]]),
        )
        for answer in answers
    ]


def split_pair(chosen: Rendered, rejected: Rendered) -> tuple[Ids, Rendered, Rendered]:
    """The prompt both share (with the header of the answer), and the two answers up to their
    last target.
    """
    prompt, good = split_answer(chosen)
    other_prompt, bad = split_answer(rejected)

    # A custom jinja template may write a prompt depending on what follows it.
    if not np.array_equal(prompt, other_prompt):
        raise DataError(
            "the template writes the prompt differently before the two answers, so they cannot be "
            "compared."
        )

    return prompt, good, bad


def split_answer(rendered: Rendered) -> tuple[Ids, Rendered]:
    """The prompt with the header of the answer, and the answer up to its last target.

    What a template writes after the last target (a newline) is left out: nothing is learned there.
    """
    answer_start = int(np.argmax(rendered.mask))
    answer_end = len(rendered.mask) - int(np.argmax(rendered.mask[::-1]))
    return rendered.ids[:answer_start], Rendered(
        rendered.ids[answer_start:answer_end], rendered.mask[answer_start:answer_end]
    )


def with_loss_on_answer(prompt: Sequence[Turn], answer: Sequence[Turn]) -> list[Turn]:
    """A conversation with loss on its answer alone."""
    return [
        *(replace(turn, learn=False) for turn in prompt),
        *(replace(turn, learn=True) for turn in answer),
    ]


class Kind(RecordKind):
    """Pairs of answers; loss is on both."""

    mark = PREFERENCE_MARK
    refusal = (
        "holds preference pairs; next-token training would train on the rejected answers, too. "
        "Set objective.kind: dpo, or use conversations (kind: chat)."
    )
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

        # The question is not required: whole dialogues bring their prompt. `Fit` explains the
        # score.
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
    """Tokens of a prompt that truncation leaves in any case: at least one, for the first target
    needs something to be predicted from.
    """
    return settings.max_prompt_length or max(1, (settings.max_length or 0) // 2)

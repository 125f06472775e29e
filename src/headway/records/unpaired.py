"""Labelled answers: a prompt, an answer to it, and whether the answer is good.

    {"prompt": "Hi", "completion": "Hello!", "label": true}
        -> one document of type "desirable", loss on the answer

`label` or `kto_tag` belongs to the answer in any form of chat.py, or to the last answer of a whole
dialogue. A missing value, one of another type and unread content are DataErrors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.errors import DataError
from headway.records.base import (
    HEADWAY_ONLY,
    UNPAIRED_MARK,
    DetectContext,
    DocumentSettings,
    EncodeContext,
    EncodedDocument,
    Fit,
    RecordFields,
    RecordKind,
)
from headway.records.parse_turns import Object, TurnReader, tools_of, with_system
from headway.records.preference import fit_answers, kept_prompt, split_answer, with_loss_on_answer
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

"""Starts the first `sources` entry in the manifest of a store of labelled answers."""
GOOD = "desirable"
BAD = "undesirable"
"""The types of its documents, in KTO's words."""
UNPAIRED_SHAPES = (
    "prompt, completion and label (true or false); or a whole conversation (messages) and label"
)


@dataclass(frozen=True)
class LabelledAnswer:
    """A prompt, an answer to it, and whether the answer is good."""

    prompt: tuple[Turn, ...]
    answer: tuple[Turn, ...]
    is_good: bool
    tools: tuple[Object, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)


def parse_unpaired(record: Record, keys: KeyMap = KeyMap()) -> LabelledAnswer:
    """The labelled answer of a record; the prompt must end with the turn to answer."""
    fields = Fields(record, keys)
    reader = TurnReader(keys)
    location = fields.place
    is_good = label_of(fields)
    prompt, answer = _prompt_and_answer(fields, reader)
    if not prompt:
        raise DataError(f"{location}: the answer has no prompt. Expected {UNPAIRED_SHAPES}.")
    if not answer or answer[0].role != "assistant" or answer[-1].role != "assistant":
        raise DataError(
            f"{location}: the turns after the prompt must be an answer of the assistant."
        )

    prompt = with_system(prompt, fields.take(fields.first(SYSTEMS)), location)

    # The system prompt is already in front, so the checks see the whole conversation.
    turns = [*prompt, *answer]
    refuse_empty(turns, location)
    if prompt[-1].role == "assistant":
        raise DataError(
            f"{location}: the prompt ends with the assistant; the turn to answer must come last."
        )

    tools = tools_of(fields.take(fields.first(TOOLS)), location)
    refuse_bad_unicode(turns, tools, location)
    return LabelledAnswer(
        tuple(prompt), tuple(answer), is_good, tools, unread_keys(fields, reader, turns)
    )


def label_of(fields: Fields) -> bool:
    """Whether an answer is good: KTO's label.

    Unlike in chat data, a label that is neither true nor false is an error: this kind needs it.
    """
    key = fields.first(LABELS)
    if key is None:
        raise DataError(
            f"{fields.place}: no label; its keys are {fields.keys}. Expected {UNPAIRED_SHAPES}."
        )

    label = fields.take(key)
    value = BINARY.get(str(label).lower())
    if value is None:
        raise DataError(
            f"{fields.place}: {key} is {str(label)[:40]!r}; it must be true (a good answer) or "
            "false (a bad one)."
        )

    return value


def _prompt_and_answer(fields: Fields, reader: TurnReader) -> tuple[list[Turn], list[Turn]]:
    """The turns before the labelled answer, and those of the answer.

    The prompt is a list of turns or a question. Where an answer is a whole dialogue, or a list of
    turns ends with the assistant, the last answer of the dialogue is the labelled one.
    """
    location = fields.place
    list_key = fields.first(LISTS)
    question_key = fields.first(QUESTIONS)
    answer_key = fields.first(ANSWERS)
    if list_key is not None:
        turns = reader.turns(fields.take(list_key), f"{location}: {list_key}")
        if turns and turns[-1].role == "assistant":
            return _last_answer(turns)

        if answer_key is None:
            raise DataError(
                f"{location}: {list_key} ends without an answer of the assistant. Expected "
                f"{UNPAIRED_SHAPES}."
            )

        return turns, answer_turns(fields.take(answer_key), f"{location}: {answer_key}", reader)

    if answer_key is None:
        raise DataError(
            f"{location}: no answer; its keys are {fields.keys}. Expected {UNPAIRED_SHAPES}."
        )

    answer = answer_turns(
        fields.take(answer_key),
        f"{location}: {answer_key}",
        reader,
        may_be_transcript=question_key is None,
    )
    if question_key is not None:
        return question_turns(question_key, fields, reader), answer

    return _last_answer(answer)


def _last_answer(turns: list[Turn]) -> tuple[list[Turn], list[Turn]]:
    """A whole dialogue, cut after the last turn of the user.

    What follows is the labelled answer, with its tool calls and their results. Without a user the
    prompt is empty, which the caller refuses.
    """
    # The last one, because only the last answer carries the label.
    last = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=-1)
    return turns[: last + 1], turns[last + 1 :]


@dataclass(frozen=True)
class UnpairedEncoder:
    """One record becomes one document, truncated as `PairEncoder` truncates.

    Loss is on the answer, good or bad. The repr is part of cache keys: do not rename it or its
    fields.
    """

    max_length: int | None
    max_prompt_length: int
    keys: KeyMap = KeyMap()

    def documents(
        self, example: LabelledAnswer, rendered: list[Rendered], context: EncodeContext
    ) -> list[EncodedDocument]:
        """The conversation as ids and loss mask; its label is its type."""
        prompt, answer = split_answer(rendered[0])
        label = GOOD if example.is_good else BAD
        fitted = fit_answers(prompt, [answer], self, context.counts)
        return [document._replace(type=label) for document in fitted]


class Kind(RecordKind):
    """Labelled answers; loss is on the answer."""

    mark = UNPAIRED_MARK
    refusal = (
        "holds answers labelled good or bad, which objective kto reads; others would train on the bad answers, too. "
        "Set objective.kind: kto, or other data."
    )
    unit = "labelled answers"
    content = "labelled answers"
    counted = "answers"
    left_out = (
        GOOD,
        BAD,
        "prompts_truncated",
        "answers_truncated",
        "bad",
    )
    shows_share = False
    is_typed = True
    least_length = 4
    targets = HEADWAY_ONLY
    recipe = None
    large_recipe = None

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        # For any other task such a record is a conversation.
        if self.name not in context.reads:
            return None

        label = context.first(data, LABELS)
        turns = context.first(data, LISTS)
        answer = context.first(data, ANSWERS)
        if label is None or (turns is None and answer is None):
            return None
        if turns is not None:
            return Fit((turns, label), 2)

        question = context.first(data, QUESTIONS)
        return Fit(tuple(key for key in (question, answer, label) if key is not None), 2)

    def parse(self, record: Record, fields: RecordFields) -> LabelledAnswer:
        return parse_unpaired(record, fields.keys)

    def conversations(self, example: LabelledAnswer) -> list[list[Turn]]:
        return [with_loss_on_answer(example.prompt, example.answer)]

    def encoder(self, settings: DocumentSettings) -> UnpairedEncoder:
        return UnpairedEncoder(settings.max_length, kept_prompt(settings), settings.keys)

    def max_length(self, seq_len: int, packing: str, reads: tuple[str, ...]) -> int | None:
        return seq_len

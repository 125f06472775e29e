"""Answers about pictures and sounds, scored.

In: a model with media inputs and records; out: shares of right and valid answers, and rows.

An answer is right if it has the same words as the record's last answer. With `blank` every question
is asked again with grey pictures and silence instead of its media: what a model knows from them
shows in the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.errors import ConfigError, DataError
from headway.eval.media_report import AnswerRow, same_answer
from headway.infer.generate import GenerateOptions
from headway.infer.media import MediaQuestion, answer_media, question_of
from headway.media.items import MediaRef
from headway.media.png import write_png
from headway.media.sound import write_wave
from headway.media.sources import read_sources
from headway.runtime.progress import progress

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.media.schema import AnswerSchema

MOST_QUESTIONS = 20
"""Questions that occur more than once are scored one by one, if there are no more than this."""
# Encoders resize pictures and read sounds of any length, so one of each is enough.
BLANKS = {
    "image": write_png(np.full((64, 64, 3), 127, np.uint8)),
    "audio": write_wave(np.zeros(16_000, np.float32), 16_000),
}


@dataclass(frozen=True)
class MultimodalPlan:
    """What is asked and how answers are checked."""

    template: str
    options: GenerateOptions = GenerateOptions()
    schema: AnswerSchema | None = None
    blank: bool = False
    limit: int | None = None
    drop_bad: bool = False


@dataclass(frozen=True)
class QuestionScore:
    """One question, over all records that ask it."""

    question: str
    records: int
    right: float
    blank: float | None = None


@dataclass(frozen=True)
class MultimodalScores:
    """What a model gets right."""

    records: int
    right: float | None
    """The share of answers with the words of the record's answer; None if no record has one."""
    blank: float | None
    """The same with grey pictures and silence."""
    valid: float | None
    """The share of answers that follow the schema."""
    dropped: int
    questions: tuple[QuestionScore, ...]
    rows: tuple[AnswerRow, ...]

    def figures(self) -> dict[str, object]:
        """The numbers by their names."""
        named: dict[str, object] = {
            "answers": self.records,
            "right": self.right,
            "right with blank media": self.blank,
            "valid": self.valid,
        }
        named["records dropped"] = self.dropped or None
        return {name: value for name, value in named.items() if value is not None}


def evaluate_multimodal(
    loaded: LoadedModel, path: Path | str, plan: MultimodalPlan
) -> MultimodalScores:
    """Answer the records of a file and compare."""
    rows: list[AnswerRow] = []
    blind_is_right: list[bool] = []
    # A list of one number, which the generator counts up.
    dropped = [0]
    questions = islice(_questions(path, plan.drop_bad, dropped), plan.limit)
    with progress("answer", unit="records", total=plan.limit) as advance:
        while chunk := list(islice(questions, plan.options.rows)):
            answers = answer_media(loaded, chunk, plan.template, plan.options)
            for question, answer in zip(chunk, answers, strict=True):
                rows.append(_row(question, answer.text, plan.schema))

            if plan.blank:
                blanked = [_blanked(question) for question in chunk]
                answers = answer_media(loaded, blanked, plan.template, plan.options)
                for question, answer in zip(chunk, answers, strict=True):
                    blind_is_right.append(same_answer(answer.text, question.expected or ""))
            advance(len(chunk))

    if not rows:
        raise ConfigError(f"{path}: no record could be asked.")
    return _scores(rows, blind_is_right if plan.blank else None, plan.schema, dropped[0])


def _questions(path: Path | str, drop_bad: bool, dropped: list[int]) -> Iterator[MediaQuestion]:
    """The questions of all records that can be read; others are refused or counted."""
    for record in read_sources(path):
        try:
            question = question_of(record)
            # Reads the file, so that a missing one is found before the batch is answered.
            for ref in question.media:
                ref.content_hash()
        except DataError as error:
            if not drop_bad:
                raise DataError(f"{error} Give --drop-bad to leave such records out.") from None
            dropped[0] += 1
            continue
        yield question


def _blanked(question: MediaQuestion) -> MediaQuestion:
    """The question with a grey picture or silence in the place of each of its media."""
    blanks = [
        MediaRef(ref.modality, data=BLANKS[ref.modality], name="blank") for ref in question.media
    ]
    return replace(question, media=tuple(blanks))


def _row(question: MediaQuestion, answer: str, schema: AnswerSchema | None) -> AnswerRow:
    asked = "\n".join(turn.content for turn in question.turns if turn.role == "user")
    problems = []
    if schema is not None:
        problems = schema.problems(answer)
    return AnswerRow(asked, answer, question.media, question.expected, "; ".join(problems))


def _scores(
    rows: Sequence[AnswerRow],
    blind_is_right: list[bool] | None,
    schema: AnswerSchema | None,
    dropped: int,
) -> MultimodalScores:
    """The scores of all rows; `blind_is_right` says of each whether it is right with blank media."""

    def share_right(indices: Sequence[int]) -> float:
        return sum(bool(rows[index].is_right) for index in indices) / len(indices)

    def share_blind(indices: Sequence[int]) -> float | None:
        if blind_is_right is None:
            return None
        return sum(blind_is_right[index] for index in indices) / len(indices)

    # Rows of records that have an answer.
    judged = [index for index, row in enumerate(rows) if row.is_right is not None]
    right = None
    blank = None
    if judged:
        right = share_right(judged)
        blank = share_blind(judged)
    valid = None
    if schema is not None:
        valid = sum(schema.is_valid(row.answer) for row in rows) / len(rows)

    # Generated data asks a few questions again and again. Where every record has a question of its
    # own, a table of them says nothing.
    by_question: dict[str, list[int]] = {}
    for index in judged:
        by_question.setdefault(plain_question(rows[index].question), []).append(index)
    repeated = {name: indices for name, indices in by_question.items() if len(indices) > 1}
    questions: list[QuestionScore] = []
    if len(repeated) <= MOST_QUESTIONS:
        for name, indices in sorted(repeated.items()):
            questions.append(
                QuestionScore(name, len(indices), share_right(indices), share_blind(indices))
            )

    return MultimodalScores(
        records=len(rows),
        right=right,
        blank=blank,
        valid=valid,
        dropped=dropped,
        questions=tuple(questions),
        rows=tuple(rows),
    )


def plain_question(text: str) -> str:
    """A question without its marks."""
    for mark in ("<image>", "<audio>", "<video>"):
        text = text.replace(mark, "")
    return " ".join(text.split())


def as_json(scores: MultimodalScores) -> dict[str, Any]:
    """The numbers, without the rows."""
    named = ("records", "right", "blank", "valid", "dropped")
    return {
        **{name: getattr(scores, name) for name in named},
        "questions": [vars(question) for question in scores.questions],
    }

"""Answers about pictures and sounds, scored. In: a model with media inputs and records; out: shares of right and valid answers, and rows.

An answer is right if it has the same words as the record's last answer. With `blank` every question is asked again with grey pictures and
silence instead of its media: what a model knows from them shows in the difference.
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

MOST_KINDS = 20
"""Questions that occur often are scored one by one, if there are no more of them than this."""
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
    blanks: list[bool] = []
    dropped = [0]
    questions = islice(_questions(path, plan.drop_bad, dropped), plan.limit)
    with progress("answer", unit="records", total=plan.limit) as advance:
        while chunk := list(islice(questions, plan.options.rows)):
            answers = answer_media(loaded, chunk, plan.template, plan.options)
            rows += [
                _row(one, found.text, plan.schema)
                for one, found in zip(chunk, answers, strict=True)
            ]
            if plan.blank:
                blind = answer_media(
                    loaded, [_blanked(one) for one in chunk], plan.template, plan.options
                )
                blanks += [
                    same_answer(found.text, one.expected or "")
                    for one, found in zip(chunk, blind, strict=True)
                ]
            advance(len(chunk))
    if not rows:
        raise ConfigError(f"{path}: no record could be asked.")
    return _scores(rows, blanks if plan.blank else None, plan.schema, dropped[0])


def _questions(path: Path | str, drop_bad: bool, dropped: list[int]) -> Iterator[MediaQuestion]:
    for record in read_sources(path):
        try:
            found = question_of(record)
            for ref in found.media:
                ref.content_hash()
        except DataError as error:
            if not drop_bad:
                raise DataError(f"{error} Give --drop-bad to leave such records out.") from None
            dropped[0] += 1
            continue
        yield found


def _blanked(question: MediaQuestion) -> MediaQuestion:
    return replace(
        question,
        media=tuple(
            MediaRef(ref.modality, data=BLANKS[ref.modality], name="blank")
            for ref in question.media
        ),
    )


def _row(question: MediaQuestion, answer: str, schema: AnswerSchema | None) -> AnswerRow:
    asked = "\n".join(turn.content for turn in question.turns if turn.role == "user")
    problems = schema.problems(answer) if schema is not None else []
    return AnswerRow(asked, answer, question.media, question.expected, "; ".join(problems))


def _scores(
    rows: Sequence[AnswerRow], blanks: list[bool] | None, schema: AnswerSchema | None, dropped: int
) -> MultimodalScores:
    judged = [number for number, row in enumerate(rows) if row.is_right is not None]

    def share(numbers: Sequence[int]) -> float:
        return sum(bool(rows[number].is_right) for number in numbers) / len(numbers)

    def blind(numbers: Sequence[int]) -> float | None:
        return None if blanks is None else sum(blanks[number] for number in numbers) / len(numbers)

    by_question: dict[str, list[int]] = {}
    for number in judged:
        by_question.setdefault(plain_question(rows[number].question), []).append(number)
    often = {name: found for name, found in by_question.items() if len(found) > 1}
    listed = sorted(often.items()) if len(often) <= MOST_KINDS else []
    return MultimodalScores(
        len(rows), share(judged) if judged else None, blind(judged) if judged else None,
        None if schema is None else sum(schema.is_valid(row.answer) for row in rows) / len(rows), dropped,
        tuple(QuestionScore(name, len(found), share(found), blind(found)) for name, found in listed), tuple(rows),
    )  # fmt: skip


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
        "questions": [vars(one) for one in scores.questions],
    }

"""A task: answers with grades. A record is a prompt, an answer and a grade; the loss of an answer counts as much as its grade."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from headway import plugin
from headway.plugin import setting

if TYPE_CHECKING:
    from torch import nn

MARK = "kind=my_lab.graded"
"""What the manifest of a store of graded answers says."""
GRADE = "grade"
"""The column of a batch with the grade of every document of a row."""


# Records: how a record is read and tokenized.


@dataclass(frozen=True)
class GradedAnswer(plugin.Conversation):
    """A conversation and how good its answer is, from 0 to 1."""

    grade: float = 1.0


@dataclass(frozen=True)
class GradedEncoder:
    """Keeps the grade as the type of a document."""

    plain: plugin.ExampleEncoder

    def documents(
        self, example: GradedAnswer, rendered: list[plugin.Rendered], context: plugin.EncodeContext
    ) -> list[plugin.EncodedDocument]:
        documents = self.plain.documents(example, rendered, context)
        return [document._replace(type=f"{example.grade:.2f}") for document in documents]


class Kind(plugin.ChatKind):
    """{"prompt": "2 + 2?", "response": "4", "grade": 1.0}."""

    mark: ClassVar[str | None] = MARK
    unit: ClassVar[str] = "graded answers"
    is_typed: ClassVar[bool] = True
    targets: ClassVar[tuple[str, ...] | None] = ("headway",)

    def parse(self, record: plugin.Record, fields: plugin.RecordFields) -> GradedAnswer:
        """The conversation; a grade outside 0 to 1 is refused with its place."""
        values: Any = record.data
        grade = values.get("grade")
        if not isinstance(grade, int | float) or not 0 <= grade <= 1:
            raise plugin.DataError(f"{record.place}: grade is {grade!r}; it must be from 0 to 1.")
        turns = (
            plugin.Turn("user", values["prompt"]),
            plugin.Turn("assistant", values["response"]),
        )
        return GradedAnswer(turns, grade=float(grade))

    def encoder(self, settings: plugin.DocumentSettings) -> Any:
        return GradedEncoder(super().encoder(settings))


# Rows: what a microbatch holds beside tokens.


class GradedSource(plugin.RecordSource):
    """A store of graded answers."""

    unit: ClassVar[str] = "answer"
    total: ClassVar[str | None] = "answers"

    def empty_columns(self, num_rows: int, layout: plugin.RowLayout) -> plugin.Columns:
        return {GRADE: np.zeros((num_rows, layout.max_documents), np.float32)}

    def fill_columns(
        self, columns: plugin.Columns, pieces: plugin.RowPieces, layout: plugin.RowLayout
    ) -> None:
        grades = [float(self.store.type_of(document)) for document in pieces.document.tolist()]
        columns[GRADE][pieces.rows, pieces.place_in_row()] = grades


class GradedReader(plugin.DocumentReader):
    splits_types = False

    def read(self, source: plugin.TokenSource) -> plugin.TokenSource:
        if not isinstance(source, plugin.Store) or MARK not in plugin.marks_of(source):
            raise plugin.ConfigError(f"data: {source.name} has no grades. Set kind: my_lab.graded.")
        return GradedSource(source)


# The task: its settings and its loss.


class Config(plugin.TaskConfig):
    """Settings of training on graded answers."""

    kind: str = setting("my_lab.graded", "This module.")
    power: float = setting(
        1.0, "Grades are raised to it; above 1 the best answers count more.", gt=0
    )

    @property
    def reads(self) -> tuple[str, ...]:
        return ("my_lab.graded",)

    def reader(self, config: plugin.DataConfig) -> GradedReader:
        return GradedReader()

    def build(self) -> GradedLoss:
        return GradedLoss(self.power)


class GradedLoss:
    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, power: float) -> None:
        self.power = power

    def loss(
        self,
        out: plugin.ModelOut,
        batch: plugin.Batch,
        at: plugin.StepInfo,
        collectives: plugin.Collectives,
    ) -> plugin.Loss:
        log_p, _ = out.head.scores(batch.targets)
        grade = batch.extra[GRADE].pow(self.power).gather(1, batch.document.long())
        weight = batch.loss_weight
        metrics = {
            "nll": ((-log_p * weight).sum().detach(), weight.sum()),
            "grade": ((grade * weight).sum(), weight.sum()),
        }
        return plugin.Loss({"graded": plugin.Term((-log_p * weight * grade).sum())}, metrics)

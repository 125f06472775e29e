"""Answers with their advantages come in, the microbatches of a step go out: the same packing and the
same layout of rows as for any other documents.

    a document    prompt, then the answer; the targets are the tokens of the answer
    a row         documents side by side, as many as fit

Every rank packs all answers of a step, from their lengths alone, and fills its own microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from headway.data.batch import (
    ADVANTAGE,
    ANSWERS,
    KEPT,
    OLD,
    ROUTES,
    SAMPLED,
    StepBatch,
    StepStats,
)
from headway.data.groups import Columns, GroupSource
from headway.data.mixture import Row
from headway.data.packing import RowShape, plan_rows
from headway.data.row_stream import PackedBlock
from headway.data.rows import RowLayout, fill_rows
from headway.data.step_plan import balanced_order
from headway.errors import DataError
from headway.rollout.journal import Floats, KeptIds, Routes
from headway.store.source import Flags, Ids, Longs

if TYPE_CHECKING:
    from headway.data.rows import RowPieces


@dataclass(frozen=True)
class TrainedAnswer:
    """An answer as an update trains on it."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: Floats
    advantage: float
    old: Floats | None = None
    """The trainer's log-probabilities before the first update."""
    has_loss: bool = True
    kept: KeptIds | None = None
    """What its tokens were drawn from; None: the whole vocabulary."""
    mask: Flags | None = None
    """Of every id: whether it may carry a loss; None: all may."""
    routes: Routes | None = None
    """The experts that its tokens take; None: those that their routers choose."""

    @property
    def num_targets(self) -> int:
        """Ids that carry a loss."""
        if not self.has_loss:
            return 0
        if self.mask is None:
            return len(self.ids)
        return int(self.mask.sum())


@dataclass(frozen=True)
class StepRows:
    """How the rows of a step are made."""

    seq_len: int
    documents_per_row: int
    """The padding counts as one."""
    micro_rows: int
    rank: int = 0
    """Among the ranks that read different rows."""
    ranks: int = 1


class AnswerSource(GroupSource):
    """The answers of one update, each a document."""

    unit: ClassVar[str] = "answer"
    total: ClassVar[str | None] = ANSWERS

    def __init__(self, answers: Sequence[TrainedAnswer]) -> None:
        self.name = "answers"
        self.fingerprint = None
        self.answers = tuple(answers)
        self.num_documents = len(self.answers)
        self._lengths = np.array(
            [len(answer.prompt) + len(answer.ids) for answer in self.answers], np.int64
        )
        self.num_tokens = int(self._lengths.sum())
        self._has_old = any(answer.old is not None for answer in self.answers)
        # Columns have one width in all microbatches of an update: that of the token with most ids.
        self._most_kept = max(
            (int(answer.kept.counts.max()) for answer in self.answers if answer.kept is not None),
            default=0,
        )
        # [layers with a mixture, experts of a token]: a property of the model, so any answer has it.
        self._routes_shape = next(
            (answer.routes.shape[1:] for answer in self.answers if answer.routes is not None), None
        )

    @cached_property
    def masked(self) -> bool:
        return True

    @cached_property
    def max_id(self) -> int:
        return max(max(answer.prompt + answer.ids) for answer in self.answers)

    def lengths(self, first: int, last: int) -> Longs:
        return self._lengths[first:last]

    def first_at(self, token: int) -> int:
        starts = np.cumsum(self._lengths) - self._lengths
        return int(np.searchsorted(starts, token))

    def tokens(self, document: int, start: int, stop: int) -> Ids:
        answer = self.answers[document]
        return np.array((answer.prompt + answer.ids)[start:stop], np.uint32)

    def mask(self, document: int, start: int, stop: int) -> Flags | None:
        answer = self.answers[document]
        flags = np.zeros(len(answer.prompt) + len(answer.ids), np.bool_)
        if not answer.has_loss:
            return flags[start:stop]
        if answer.mask is None:
            flags[len(answer.prompt) :] = True
        else:
            flags[len(answer.prompt) :] = answer.mask
        return flags[start:stop]

    def empty_columns(self, num_rows: int, layout: RowLayout) -> Columns:
        """Advantages and log-probabilities [rows, seq_len] at the positions of their targets; kept
        ids [rows, seq_len, most of a token] where the sampling was cut; experts [rows, seq_len,
        layers, k] at the tokens themselves, where they are replayed."""
        names = [ADVANTAGE, SAMPLED]
        if self._has_old:
            names.append(OLD)
        columns: Columns = {
            name: np.zeros((num_rows, layout.seq_len), np.float32) for name in names
        }
        if self._most_kept:
            # Not 0, which is an id: -1 stands for none. Among routes it stands for the router's
            # own choice.
            columns[KEPT] = np.full((num_rows, layout.seq_len, self._most_kept), -1, np.int32)
        if self._routes_shape is not None:
            shape = (num_rows, layout.seq_len, *self._routes_shape)
            columns[ROUTES] = np.full(shape, -1, np.int16)
        return columns

    def fill_columns(self, columns: Columns, pieces: RowPieces, layout: RowLayout) -> None:
        # Where each piece begins in its row: after the pieces before it.
        begins = np.cumsum(pieces.length) - pieces.length
        first_of_row = np.searchsorted(pieces.rows, pieces.rows)
        begins = begins - begins[first_of_row]
        for row, document, begin in zip(
            pieces.rows.tolist(), pieces.document.tolist(), begins.tolist(), strict=True
        ):
            answer = self.answers[document]
            # The position before a token predicts it.
            first = begin + len(answer.prompt) - 1
            part = slice(first, first + len(answer.ids))
            columns[ADVANTAGE][row, part] = answer.advantage
            columns[SAMPLED][row, part] = answer.logprobs
            if answer.old is not None:
                columns[OLD][row, part] = answer.old
            if answer.routes is not None:
                # At the tokens that went through the experts. The last one of an answer went through
                # none: nothing was drawn after it.
                columns[ROUTES][row, begin : begin + len(answer.routes)] = answer.routes
            if answer.kept is not None:
                for offset, ids in enumerate(answer.kept.of_tokens()):
                    columns[KEPT][row, first + offset, : len(ids)] = ids


@dataclass(frozen=True)
class AnswerStep:
    """The microbatches of an update, and which answers stand where."""

    batch: StepBatch
    places: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Of each local microbatch: (answer, row, first position that predicts one of its tokens)."""


def answer_step(
    answers: Sequence[TrainedAnswer],
    shape: StepRows,
    epoch: int,
    facts: Mapping[str, float] | None = None,
) -> AnswerStep:
    """One update on some answers: this rank's microbatches, and totals over all ranks."""
    source = AnswerSource(answers)
    longest = int(source.lengths(0, source.num_documents).max())
    if longest > shape.seq_len:
        raise DataError(
            f"an answer with its prompt has {longest} tokens, and a row {shape.seq_len} "
            "(data.seq_len). Raise data.seq_len, or lower rollout.max_new_tokens."
        )
    layout = RowLayout([source], shape.seq_len, shape.documents_per_row, one_document=False)
    # A pad token at the end of a row is a document of its own, so one place stays free for it. In
    # which row an answer stands changes no loss, so rows are filled as full as they get.
    numbers = np.arange(source.num_documents)
    row_shape = RowShape(shape.seq_len, shape.documents_per_row - 1, "best_fit")
    plan = plan_rows(numbers, source.lengths(0, source.num_documents), row_shape)
    block = PackedBlock(plan, list(range(plan.num_rows)))
    rows: list[Row | None] = [Row(0, block, number) for number in range(plan.num_rows)]

    # As for stored data: balanced before it is filled up for the ranks, so that the order of rows
    # does not depend on their number.
    num_filled = len(rows)
    rows += [None] * (-len(rows) % shape.micro_rows)
    work = [0 if row is None else row.work for row in rows]
    rows = [rows[index] for index in balanced_order(work, shape.micro_rows)]
    # Collectives run in every microbatch: all ranks need equally many, some without an answer.
    per_rank = -(-len(rows) // (shape.micro_rows * shape.ranks))
    rows += [None] * (per_rank * shape.ranks * shape.micro_rows - len(rows))

    first = shape.rank * per_rank
    groups = [
        rows[number * shape.micro_rows : (number + 1) * shape.micro_rows]
        for number in range(first, first + per_rank)
    ]
    num_targets = sum(answer.num_targets for answer in answers)
    documents = [0 if row is None else row.segments for row in rows]
    micro_documents = [
        sum(documents[index : index + shape.micro_rows])
        for index in range(0, len(rows), shape.micro_rows)
    ]
    stats = StepStats(
        tokens=source.num_tokens,
        documents=len(answers),
        largest_length=longest,
        largest_batch=max(micro_documents),
        smallest_batch=min(micro_documents),
        epoch=epoch,
    )
    totals = {
        "targets": float(num_targets),
        "rows": float(num_filled),
        ANSWERS: float(len(answers)),
    }
    batch = StepBatch(
        tuple(fill_rows(group, layout)[0] for group in groups),
        totals,
        stats,
        first,
        (num_filled,),
        facts=dict(facts or {}),
    )
    return AnswerStep(batch, [_places(group, source) for group in groups])


def _places(rows: Sequence[Row | None], source: AnswerSource) -> list[tuple[int, int, int]]:
    places: list[tuple[int, int, int]] = []
    for number, row in enumerate(rows):
        begin = 0
        for document in [] if row is None else row.documents:
            answer = source.answers[document]
            places.append((document, number, begin + len(answer.prompt) - 1))
            begin += len(answer.prompt) + len(answer.ids)
    return places

"""Distillation: the model learns the whole distribution that a frozen teacher gives to every
target, and the target itself (Hinton et al. 2015, arXiv:1503.02531).

In: a batch with the teacher's hidden states and the teacher's head, or with what is stored of the
teacher's likeliest tokens; out: one term over targets. kernels/distill_loss.py and
kernels/topk_distill_loss.py have the formulas. Teacher and model may differ in everything but the
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import PrivateAttr, model_validator

from headway.config.section import setting
from headway.data.batch import TEACHER_STATES
from headway.tasks.base import (
    Collectives,
    Loss,
    MetricSums,
    ReferenceSpec,
    StepInfo,
    TaskConfig,
    TaskNeeds,
    TeacherCacheSpec,
    Term,
)
from headway.tasks.next_token import by_source

if TYPE_CHECKING:
    from torch import nn

    from headway.data.batch import Batch
    from headway.kernels.distill_loss import Distilled, DistillShaping, TeacherHead
    from headway.model.base import ModelOut


class Config(TaskConfig):
    """Settings of distillation."""

    kind: str = setting("distill", "distill.", on_resume="fixed")
    teacher: str | None = setting(
        None,
        "The model to learn from: a run, a checkpoint or a Hugging Face folder with the same "
        "vocabulary; null = the weights the run starts from (keeps a fine-tuned model near them).",
        on_resume="fixed",
    )
    cache: str | tuple[str, ...] | None = setting(
        None,
        "Stored logits of a teacher instead of a teacher in memory: folders that `headway data "
        "teacher-logits` wrote, one or more for every store of the data, or a folder of such "
        "folders.",
    )
    tail: Literal["bucket", "drop"] = setting(
        "bucket",
        "With cache: tokens beyond the stored ones count as one class (bucket), or both "
        "distributions are those of the stored tokens alone (drop).",
    )
    direction: Literal["forward", "reverse"] = setting(
        "forward",
        "forward: KL(teacher || model), covers all the teacher says. reverse: KL(model || "
        "teacher), keeps to its likeliest.",
    )
    temperature: float = setting(
        1.0,
        "Both models' logits are divided by it for the divergence; its loss is multiplied by its "
        "square.",
        gt=0,
    )
    alpha: float = setting(
        0.5, "Share of the divergence in the loss; the rest is next-token prediction.", gt=0, le=1
    )

    # Not a setting: the loaded teacher's head, which `build` passes on.
    _head: TeacherHead | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _has_one_teacher(self) -> Self:
        if self.cache is not None and self.teacher is not None:
            raise ValueError(
                "teacher and cache are both given; cache needs no teacher in memory. Remove one "
                "of them."
            )
        if self.cache is not None and not self.cache:
            raise ValueError(
                "cache names no folder. Give what `headway data teacher-logits` wrote, or remove "
                "it."
            )
        if self.cache is None and self.tail != "bucket":
            raise ValueError(
                f"tail is {self.tail!r}, which is for stored logits. Give cache, or remove tail."
            )
        return self

    @property
    def needs(self) -> TaskNeeds:
        """The teacher in memory, or its stored logits."""
        if self.cache is None:
            return TaskNeeds(frozen=ReferenceSpec(self.teacher, cached=False))
        if isinstance(self.cache, str):
            paths = (self.cache,)
        else:
            paths = self.cache
        # The bucket's probability is stored for one temperature; `drop` reads the stored tokens
        # alone.
        temperature = self.temperature if self.tail == "bucket" else None
        return TaskNeeds(stored_logits=TeacherCacheSpec(paths, temperature))

    def with_teacher_head(self, head: TeacherHead) -> Config:
        """These settings with a loaded teacher's head."""
        config = self.model_copy()
        config._head = head
        return config

    def build(self) -> Distill:
        return Distill(self, self._head)


class Distill:
    """Divergence from the teacher and cross-entropy, summed with the batch's loss weights."""

    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, config: Config, head: TeacherHead | None) -> None:
        self.config = config
        self.head = head

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """One term. Its gradient is computed in the same pass as its value."""
        from headway.kernels.distill_loss import DistillShaping

        config = self.config
        weight = batch.loss_weight
        shaping = DistillShaping(config.temperature, config.direction == "reverse", config.alpha)
        scored = self._score(out, batch, shaping)

        total = weight.sum()
        per_token = {"nll": scored.nll, "accuracy": scored.correct, "kl": scored.kl}
        metrics: MetricSums = {
            name: ((value * weight).sum(), total) for name, value in per_token.items()
        }
        if at.num_sources > 1:
            source_weights = by_source(weight.sum(1), batch, at)
            for name, value in per_token.items():
                source_sums = by_source((value * weight).sum(1), batch, at)
                metrics[f"{name}/source"] = (source_sums, source_weights)
        return Loss({"distill": Term(scored.total)}, metrics)

    def _score(self, out: ModelOut, batch: Batch, shaping: DistillShaping) -> Distilled:
        """Divergence and cross-entropy of every token, against stored logits or a live teacher."""
        from headway.data.teacher import IDS_COLUMN, LOG_PROBS_COLUMN
        from headway.kernels.topk_distill_loss import TopLogProbs

        if self.config.cache is not None:
            teacher = TopLogProbs(batch.extra[IDS_COLUMN], batch.extra[LOG_PROBS_COLUMN])
            return out.head.distill_top_k(
                batch.targets, batch.loss_weight, teacher, shaping, self.config.tail == "drop"
            )
        if self.head is None:
            raise AssertionError("the teacher is not loaded")
        # The teacher's logits are never whole either: its head is applied chunk by chunk, beside
        # the model's.
        return out.head.distill(
            batch.targets, batch.loss_weight, batch.extra[TEACHER_STATES], self.head, shaping
        )

"""Distillation: the model learns the whole distribution that a frozen teacher gives to every target, beside the target itself.

In: a batch with the teacher's hidden states and the teacher's head; out: one term over targets. kernels/distill_loss.py has the formula.
Teacher and model may differ in everything but the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import PrivateAttr

from headway.config.section import setting
from headway.objective.base import Collectives, Loss, MetricSums, ObjectiveConfig, ReferenceSpec, StepInfo, Term
from headway.objective.next_token import by_source

if TYPE_CHECKING:
    from torch import nn

    from headway.data.batch import Batch
    from headway.kernels.distill_loss import TeacherHead
    from headway.model.base import ModelOut

TAUGHT = "teacher"
"""The column of a batch with the teacher's hidden states: [rows, seq_len, width of the teacher]."""


class Config(ObjectiveConfig):
    """Settings of distillation."""

    kind: str = setting("distill", "distill.", on_resume="fixed")
    teacher: str | None = setting(
        None,
        "The model to learn from: a run, a checkpoint or a Hugging Face folder with the same vocabulary; null = the weights the run starts "
        "from (keeps a fine-tuned model near them).",
        on_resume="fixed",
    )
    direction: Literal["forward", "reverse"] = setting(
        "forward", "forward: KL(teacher || model), covers all the teacher says. reverse: KL(model || teacher), keeps to its likeliest."
    )
    temperature: float = setting(
        1.0, "Both models' logits are divided by it for the divergence; its loss is multiplied by its square.", gt=0
    )
    alpha: float = setting(0.5, "Share of the divergence in the loss; the rest is next-token prediction.", gt=0, le=1)

    _head: TeacherHead | None = PrivateAttr(None)

    @property
    def reference_spec(self) -> ReferenceSpec | None:
        """The teacher."""
        return ReferenceSpec(self.teacher, cached=False, is_teacher=True)

    def with_head(self, head: TeacherHead) -> Config:
        """These settings with a loaded teacher's head."""
        taught = self.model_copy()
        taught._head = head
        return taught

    def build(self) -> Distill:
        """Make the objective."""
        return Distill(self, self._head)


class Distill:
    """Divergence from the teacher and cross-entropy, summed with the batch's loss weights."""

    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, config: Config, head: TeacherHead | None) -> None:
        self.config, self.head = config, head

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """One term. Its gradient is computed in the same pass as its value."""
        from headway.kernels.distill_loss import DistillShaping

        if self.head is None:
            raise AssertionError("the teacher is not loaded")
        config, weight = self.config, batch.loss_weight
        shaping = DistillShaping(config.temperature, config.direction == "reverse", config.alpha)
        scored = out.head.distill(batch.targets, weight, batch.extra[TAUGHT], self.head, shaping)
        total = weight.sum()
        found = {"nll": scored.nll, "accuracy": scored.correct, "kl": scored.kl}
        metrics: MetricSums = {name: ((value * weight).sum(), total) for name, value in found.items()}
        if at.num_sources > 1:
            weights = by_source(weight.sum(1), batch, at)
            for name, value in found.items():
                metrics[f"{name}/source"] = (by_source((value * weight).sum(1), batch, at), weights)
        return Loss({"distill": Term(scored.total)}, metrics)

"""A loss that gives less weight to tokens the model predicts well already: (1 - p)^gamma * -log p."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from headway.config.section import setting
from headway.objective.base import Collectives, Loss, ObjectiveConfig, StepInfo, Term

if TYPE_CHECKING:
    from torch import nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut


class Config(ObjectiveConfig):
    """Settings of the focal loss."""

    BY_TOKEN: ClassVar[bool] = True

    kind: str = setting("my_lab.focal_loss", "This module.")
    gamma: float = setting(
        2.0, "How much less weight well predicted tokens get; 0 = plain cross-entropy.", ge=0
    )

    def build(self) -> FocalLoss:
        return FocalLoss(self.gamma)


class FocalLoss:
    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, gamma: float) -> None:
        self.gamma = gamma

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        log_p, _ = out.head.scores(batch.targets)
        weight = batch.loss_weight
        focal = (1 - log_p.exp()).clamp(min=1e-6).pow(self.gamma) * -log_p
        # A sum, never a mean: headway divides by the weight of the whole step, over all microbatches and ranks.
        return Loss(
            {"focal": Term((focal * weight).sum())},
            {"nll": ((-log_p * weight).sum().detach(), weight.sum())},
        )

"""A loss that gives less weight to tokens the model predicts well already: (1 - p)^gamma * -log p."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.plugin import Collectives, Loss, StepInfo, TaskConfig, TaskNeeds, Term, setting

if TYPE_CHECKING:
    from torch import nn

    from headway.plugin import Batch, ModelOut


class Config(TaskConfig):
    """Settings of the focal loss."""

    kind: str = setting("my_lab.focal_loss", "This module.")
    gamma: float = setting(
        2.0, "How much less weight well predicted tokens get; 0 = plain cross-entropy.", ge=0
    )

    @property
    def needs(self) -> TaskNeeds:
        """It is a sum over tokens, so ranks may share a row."""
        return TaskNeeds(whole_rows=False)

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

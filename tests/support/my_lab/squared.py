"""An objective with a parameter of its own: the square of each token's loss, scaled by a trained temperature."""

from typing import Any, Literal

from headway.config.section import setting
from headway.tasks.base import Loss, TaskConfig, Term


class Config(TaskConfig):
    """Settings of the squared loss."""

    kind: str = setting("support.my_lab.squared", "This module.")
    power: float = setting(2.0, "Exponent of the token loss.", gt=0)

    def build(self) -> Any:
        return Squared(self.power)


class Squared:
    scope: Literal["row", "step"] = "row"

    def __init__(self, power: float) -> None:
        import torch

        self.power = power
        self.module = torch.nn.Module()
        self.module.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def loss(self, out: Any, batch: Any, at: Any, exchange: Any) -> Loss:
        log_prob, _ = out.head.scores(batch.targets)
        per_token = (-log_prob).pow(self.power) * batch.loss_weight
        total = batch.loss_weight.sum()
        scaled = per_token.sum() * self.module.scale.sum()
        return Loss(
            {"squared": Term(scaled)},
            {"nll": ((-log_prob * batch.loss_weight).sum().detach(), total)},
        )

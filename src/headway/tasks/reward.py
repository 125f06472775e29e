"""Reward model: a score of every answer, higher for the chosen one of each pair (Bradley-Terry;
Ouyang et al. 2022, arXiv:2203.02155).

In: rows of pairs (documents 2i chosen, 2i + 1 rejected) and the model's score head; out: one term
over pairs. With c and r the scores of the chosen and of the rejected conversation, each at its last
token:

    -log s(c - r - m) + k (c + r)^2          m: margin, k: center_rewards_coefficient, s: the
                                             logistic function

The second part keeps scores near zero: the first one depends on their difference alone
(Eisenstein et al. 2023, arXiv:2312.09244).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.config.section import setting
from headway.tasks.base import Collectives, Loss, MetricSums, StepInfo, TaskNeeds, Term
from headway.tasks.preference import PreferenceConfig
from headway.tasks.preference.loss import share_right, sides

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut


class Config(PreferenceConfig):
    """Settings of a reward model."""

    kind: str = setting("reward", "reward.", on_resume="fixed")
    margin: float = setting(
        0.0, "The margin by which the chosen answer's score should be higher.", ge=0
    )
    center_rewards_coefficient: float = setting(
        0.0,
        "Weight of (chosen + rejected)^2 beside the loss of the difference, which keeps scores "
        "near zero; 0.01 is usual.",
        ge=0,
    )

    @property
    def needs(self) -> TaskNeeds:
        """A head that scores documents."""
        return TaskNeeds(head="scores")

    def build(self) -> Reward:
        return Reward(self)


class Reward:
    """The loss of each pair's difference of scores."""

    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The formula at the top, summed over pairs; scores are taken at each document's last
        token."""
        from torch.nn.functional import logsigmoid

        if out.score is None:
            raise AssertionError("resolve gives the model a score head")
        chosen, rejected, is_pair = _scored_pairs(out.score.of_documents(batch.bounds), batch)
        per_pair = -logsigmoid(chosen - rejected - self.config.margin)
        if self.config.center_rewards_coefficient:
            off_center = (chosen + rejected).square()
            per_pair = per_pair + self.config.center_rewards_coefficient * off_center

        total = (per_pair * is_pair).sum()
        count = is_pair.sum()
        per_pair_metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/mean": (chosen + rejected) / 2,
            "rewards/accuracies": share_right(chosen - rejected),
            "rewards/margins": chosen - rejected,
        }
        metrics: MetricSums = {
            name: ((value.detach() * is_pair).sum(), count)
            for name, value in per_pair_metrics.items()
        }
        if not at.training:
            metrics = {"loss": (total, count), **metrics}
        return Loss({"reward": Term(total, per="pairs")}, metrics)


def _scored_pairs(scores: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the chosen and of the rejected side, and 1 where there is a pair: [rows, pairs of a
    row]. Other places have score 0."""
    # Documents without a loss target are padding. Their scores are replaced, not multiplied: a NaN
    # there would survive a product with 0.
    lengths = sides(batch.sum_documents(batch.loss_weight))
    is_pair = (lengths[0] > 0) & (lengths[1] > 0)
    chosen, rejected = (side.masked_fill(~is_pair, 0.0) for side in sides(scores))
    return chosen, rejected, is_pair.to(scores.dtype)

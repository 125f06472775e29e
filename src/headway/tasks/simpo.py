"""SimPO: the chosen answer should be likelier per token than the rejected one, by a margin. No
reference model.

In: rows of pairs (tasks/preference/); out: one term over pairs (Meng et al. 2024,
arXiv:2405.14734). With c and r the mean log-probability of a token of the chosen and of the
rejected answer and m = b (c - r) - g:

    -(1 - e) log s(m) - e log s(-m)          b: beta, g: gamma, e: label_smoothing, s: the logistic
                                             function
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.section import setting
from headway.tasks.base import StepInfo
from headway.tasks.preference import PreferenceConfig
from headway.tasks.preference.loss import Pairs, PerTokenTask

if TYPE_CHECKING:
    from torch import Tensor


class Config(PreferenceConfig):
    """Settings of SimPO."""

    kind: str = setting("simpo", "simpo.", on_resume="fixed")
    beta: float = setting(
        2.0,
        "Scale of the rewards: reward = beta * mean log-probability of an answer's tokens.",
        gt=0,
    )
    gamma: float = setting(
        1.0, "The margin by which the chosen answer's reward should be higher.", ge=0
    )
    label_smoothing: float = setting(
        0.0, "Share of pairs assumed to be labelled the wrong way round.", ge=0, lt=0.5
    )

    def build(self) -> SimPO:
        return SimPO(self)


class SimPO(PerTokenTask):
    """The loss of each pair's margin per token."""

    name = "simpo"

    def __init__(self, config: Config) -> None:
        super().__init__(config.beta)
        self.config = config

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """The formula at the top for every pair: [rows, pairs of a row]."""
        from torch.nn.functional import logsigmoid

        # Per token and without a reference: gains are mean log-probabilities (PerTokenTask).
        margin = self.config.beta * (pairs.chosen_gain - pairs.rejected_gain) - self.config.gamma
        smoothing = self.config.label_smoothing
        return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)

"""ORPO: supervised tuning on the chosen answer and, in the same loss, higher odds for it than for
the rejected one. No reference model.

In: rows of pairs (tasks/preference/); out: one term over pairs (Hong et al. 2024,
arXiv:2403.07691). With c and r the mean log-probability of a token of the chosen and of the
rejected answer, and s the logistic function:

    -c - b log s(odds(c) - odds(r)),     odds(x) = x - log(1 - e^x)       b: beta

The first part is the mean over the answer's tokens; the prompt carries no loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.section import setting
from headway.tasks.base import MetricSums, StepInfo
from headway.tasks.preference import PreferenceConfig
from headway.tasks.preference.loss import Pairs, PerTokenTask

if TYPE_CHECKING:
    from torch import Tensor


class Config(PreferenceConfig):
    """Settings of ORPO."""

    kind: str = setting("orpo", "orpo.", on_resume="fixed")
    beta: float = setting(0.1, "Weight of the odds ratio beside the supervised loss.", gt=0)

    def build(self) -> ORPO:
        return ORPO(self)


class ORPO(PerTokenTask):
    """Supervised loss and odds ratio of each pair."""

    name = "orpo"

    def __init__(self, config: Config) -> None:
        super().__init__(config.beta)
        self.config = config

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """The formula at the top for every pair: [rows, pairs of a row]."""
        return -pairs.chosen_gain - self.config.beta * _log_ratio(pairs)

    def metrics(self, pairs: Pairs, total: Tensor, at: StepInfo) -> MetricSums:
        """Both parts beside the rewards. A plain `nll` would take the place of the loss in a
        validation."""
        metrics = super().metrics(pairs, total, at)
        count = pairs.is_pair.sum()
        parts = {"nll/chosen": -pairs.chosen_gain, "log_odds_ratio": _log_ratio(pairs)}
        for name, value in parts.items():
            metrics[name] = ((value.detach() * pairs.is_pair).sum(), count)
        return metrics


def _log_ratio(pairs: Pairs) -> Tensor:
    """log s(odds of the chosen answer - odds of the rejected one)."""
    from torch.nn.functional import logsigmoid

    # Without a reference and per token, gains are mean log-probabilities.
    c = pairs.chosen_gain
    r = pairs.rejected_gain
    return logsigmoid((c - r) - (_log_rest(c) - _log_rest(r)))


def _log_rest(x: Tensor) -> Tensor:
    """log(1 - e^x) of x < 0, exact near 0 and far from it; at 0 the nearest number below, so that
    no row is NaN."""
    import torch

    # Both forms lose digits in the other's range; they meet at e^x = 1/2, x = -ln 2.
    x = x.float().clamp(max=-1e-7)
    # The other branch gets a harmless number: where() would pass on its NaN gradient.
    near = x.clamp(min=-0.7)
    far = x.clamp(max=-0.6)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))

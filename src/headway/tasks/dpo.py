"""Direct preference optimisation: the model learns to prefer the chosen answer over the rejected
one by more than a frozen reference does.

In: rows of pairs (documents 2i chosen, 2i + 1 rejected) and the reference's log-probabilities of
them; out: one term over pairs. With c and r the log-probability of the chosen and the rejected
answer (summed over its tokens) minus the reference's, and h = c - r (Rafailov et al. 2023,
arXiv:2305.18290, and TRL's names of the variants):

    sigmoid     -(1 - e) log s(b h) - e log s(-b h)
    robust      [-(1 - e) log s(b h) + e log s(-b h)] / (1 - 2 e)
    hinge       max(0, 1 - b h)
    ipo         (c / length - r / length - 1 / (2 b))^2
    kto_pair    [2 - s(b (c - max(0, mean r))) - s(b (max(0, mean c) - r))] / 2
    sppo_hard   (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2
    nca_pair    -log s(b c) - log s(-b c) / 2 - log s(-b r) / 2

    b: beta, e: label_smoothing, s: the logistic function; lengths of the answers in tokens; means
    over the step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from headway.config.section import setting
from headway.tasks.base import FirstPass, ReferenceSpec, StepInfo, TaskNeeds
from headway.tasks.preference import PreferenceConfig
from headway.tasks.preference.loss import PairColumns, Pairs, PairTask

if TYPE_CHECKING:
    from torch import Tensor

    from headway.data.batch import Batch
    from headway.model.base import ModelOut

LossType = Literal["sigmoid", "robust", "hinge", "ipo", "kto_pair", "sppo_hard", "nca_pair"]
SMOOTHED = ("sigmoid", "robust")
GAINS = "gains"
"""The name of the first pass of `kto_pair`."""


class Config(PreferenceConfig):
    """Settings of direct preference optimisation."""

    kind: str = setting("dpo", "dpo.", on_resume="fixed")
    loss_type: LossType = setting(
        "sigmoid", "The loss of a pair's margin over the reference.", on_resume="fixed"
    )
    beta: float = setting(
        0.1,
        "How strongly the model is kept near the reference; a smaller value lets it move further.",
        gt=0,
    )
    label_smoothing: float = setting(
        0.0,
        "Share of pairs assumed to be labelled the wrong way round (loss_type sigmoid and robust).",
        ge=0,
        lt=0.5,
    )
    reference_free: bool = setting(
        False,
        "Load no reference; it counts as giving all answers the same probability.",
        on_resume="fixed",
    )
    reference: str | None = setting(
        None,
        "The reference model: a run, a checkpoint or a Hugging Face folder; null = the weights "
        "the run starts from.",
        on_resume="fixed",
    )
    reference_logps: Literal["live", "cached"] = setting(
        "live",
        "live: keep the reference as a second model. cached: score the pairs it reads once and "
        "store the results in data.cache_dir.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"has loss_type={self.loss_type} and label_smoothing={self.label_smoothing:g}; "
                f"only {' and '.join(SMOOTHED)} use it. Remove label_smoothing"
            )
        if self.reference_free and (self.reference is not None or self.reference_logps != "live"):
            raise ValueError(
                "has reference_free=true and settings of a reference, which would be ignored. "
                "Remove one of them"
            )
        return self

    @property
    def needs(self) -> TaskNeeds:
        """A frozen reference, live or as stored log-probabilities; none if reference_free."""
        if self.reference_free:
            return TaskNeeds()
        is_cached = self.reference_logps == "cached"
        return TaskNeeds(frozen=ReferenceSpec(self.reference, is_cached, PairColumns()))

    def build(self) -> DPO:
        if self.loss_type == "kto_pair":
            return KTOPair(self)
        return DPO(self)


class DPO(PairTask):
    """One term: the loss of each pair's margin over the reference, per pair."""

    name = "dpo"

    def __init__(self, config: Config) -> None:
        super().__init__(config.beta)
        self.config = config

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """The loss of every pair, by the formulas at the top."""
        from torch.nn.functional import logsigmoid

        beta = self.config.beta
        smoothing = self.config.label_smoothing
        c = pairs.chosen_gain
        r = pairs.rejected_gain
        margin = beta * (c - r)
        match self.config.loss_type:
            case "sigmoid":
                return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
            case "robust":
                # Unbiased where a share e of the labels is flipped; e < 1/2 keeps the divisor
                # positive.
                flipped = -(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)
                return flipped / (1 - 2 * smoothing)
            case "hinge":
                return (1 - margin).relu()
            case "ipo":
                # Per token, as in TRL; an empty slot has length 0 and is masked out later.
                chosen_mean = c / pairs.chosen_length.clamp(min=1)
                rejected_mean = r / pairs.rejected_length.clamp(min=1)
                return (chosen_mean - rejected_mean - 1 / (2 * beta)).square()
            case "sppo_hard":
                return (c - 1 / (2 * beta)).square() + (r + 1 / (2 * beta)).square()
            case "nca_pair":
                # Pushes the absolute gain of the chosen answer, not only the margin.
                return (
                    -logsigmoid(beta * c)
                    - 0.5 * logsigmoid(-beta * c)
                    - 0.5 * logsigmoid(-beta * r)
                )
            case "kto_pair":
                raise AssertionError("kto_pair is KTOPair's")


class KTOPair(DPO):
    """Compares every answer with the mean gain of the opposite side over the whole step; gradients
    also flow through that mean."""

    scope: Literal["row", "step"] = "step"

    def first_passes(self) -> tuple[FirstPass, ...]:
        """The gains of all pairs of the step, for their means."""
        return (FirstPass(GAINS, self.read_gains),)

    def read_gains(self, out: ModelOut, batch: Batch) -> Tensor:
        """Gains of every pair, and whether it is one: [rows * pairs of a row, 3]."""
        return _gains(self.pairs(out, batch))

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """Means enter as constants; an added term of value zero carries their gradient.

        So every microbatch back-propagates its own part of the gradient that a single large batch
        would have.
        """
        if GAINS in at.seen:
            step_gains = at.seen[GAINS].values
        else:
            # one microbatch on one rank: its pairs are those of the step
            step_gains = _gains(pairs).detach()
        # Without gradients: the values of the whole step, the same on all ranks.
        c, r, is_pair = step_gains.unbind(1)

        beta = self.config.beta
        count = is_pair.sum().clamp(min=1)
        mean_c = (c * is_pair).sum() / count
        mean_r = (r * is_pair).sum() / count
        clamped_c = mean_c.clamp(min=0)
        clamped_r = mean_r.clamp(min=0)
        chosen_utility = (beta * (c - clamped_r)).sigmoid()
        rejected_utility = (beta * (clamped_c - r)).sigmoid()

        # How the step's loss changes with each mean; below zero the clamp holds it.
        chosen_slope = chosen_utility * (1 - chosen_utility)
        rejected_slope = rejected_utility * (1 - rejected_utility)
        by_mean_c = -(beta * rejected_slope * is_pair).sum() / (2 * count) * (mean_c >= 0)
        by_mean_r = (beta * chosen_slope * is_pair).sum() / (2 * count) * (mean_r >= 0)

        value = (
            2
            - (beta * (pairs.chosen_gain - clamped_r)).sigmoid()
            - (beta * (clamped_c - pairs.rejected_gain)).sigmoid()
        )
        # x - x.detach() is zero and has the gradient of x
        through_mean_c = by_mean_c * (pairs.chosen_gain - pairs.chosen_gain.detach())
        through_mean_r = by_mean_r * (pairs.rejected_gain - pairs.rejected_gain.detach())
        return value / 2 + (through_mean_c + through_mean_r)


def _gains(pairs: Pairs) -> Tensor:
    """[rows * pairs of a row, 3]: gain of the chosen answer, of the rejected one, and is_pair."""
    import torch

    columns = [pairs.chosen_gain, pairs.rejected_gain, pairs.is_pair]
    return torch.stack(columns, dim=-1).flatten(0, 1)

"""Direct preference optimisation: the model learns to prefer the chosen answer over the rejected one by more than a frozen reference does.

In: rows of pairs (documents 2i chosen, 2i + 1 rejected) and the reference's log-probabilities of them; out: one term over pairs.
With c and r the log-probability of the chosen and the rejected answer (summed over its tokens) minus the reference's, and h = c - r:

    sigmoid     -(1 - e) log s(b h) - e log s(-b h)                      b: beta, e: label_smoothing, s: the logistic function
    robust      [-(1 - e) log s(b h) + e log s(-b h)] / (1 - 2 e)
    hinge       max(0, 1 - b h)
    ipo         (c / length - r / length - 1 / (2 b))^2                  lengths of the answers in tokens
    kto_pair    [2 - s(b (c - max(0, mean r))) - s(b (max(0, mean c) - r))] / 2      means over the step
    sppo_hard   (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2
    nca_pair    -log s(b c) - log s(-b c) / 2 - log s(-b r) / 2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from headway.config.section import setting
from headway.tasks.base import ReferenceSpec, StepInfo, TaskNeeds
from headway.tasks.preference import PreferenceConfig
from headway.tasks.preference.loss import PairColumns, Pairs, PairTask

if TYPE_CHECKING:
    from torch import Tensor

    from headway.data.batch import Batch
    from headway.model.base import ModelOut

LossType = Literal["sigmoid", "robust", "hinge", "ipo", "kto_pair", "sppo_hard", "nca_pair"]
SMOOTHED = ("sigmoid", "robust")


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
        "The reference model: a run, a checkpoint or a Hugging Face folder; null = the weights the run starts from.",
        on_resume="fixed",
    )
    reference_logps: Literal["live", "cached"] = setting(
        "live",
        "live: keep the reference as a second model. cached: score the pairs it reads once and store the results in data.cache_dir.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"has loss_type={self.loss_type} and label_smoothing={self.label_smoothing:g}; only {' and '.join(SMOOTHED)} use it. "
                "Remove label_smoothing"
            )
        if self.reference_free and (self.reference is not None or self.reference_logps != "live"):
            raise ValueError(
                "has reference_free=true and settings of a reference, which would be ignored. Remove one of them"
            )
        return self

    @property
    def needs(self) -> TaskNeeds:
        """The frozen model to compare with."""
        if self.reference_free:
            return TaskNeeds()
        is_cached = self.reference_logps == "cached"
        return TaskNeeds(frozen=ReferenceSpec(self.reference, is_cached, PairColumns()))

    def build(self) -> DPO:
        """Make the objective."""
        return KTOPair(self) if self.loss_type == "kto_pair" else DPO(self)


class DPO(PairTask):
    """One term: the loss of each pair's margin over the reference, per pair."""

    name = "dpo"

    def __init__(self, config: Config) -> None:
        super().__init__(config.beta)
        self.config = config

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """The loss of every pair, by the formulas at the top."""
        from torch.nn.functional import logsigmoid

        beta, smoothing = self.config.beta, self.config.label_smoothing
        c, r = pairs.chosen_gain, pairs.rejected_gain
        margin = beta * (c - r)
        match self.config.loss_type:
            case "sigmoid":
                return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
            case "robust":
                return (-(1 - smoothing) * logsigmoid(margin) + smoothing * logsigmoid(-margin)) / (
                    1 - 2 * smoothing
                )
            case "hinge":
                return (1 - margin).relu()
            case "ipo":
                average = c / pairs.chosen_length.clamp(min=1) - r / pairs.rejected_length.clamp(
                    min=1
                )
                return (average - 1 / (2 * beta)).square()
            case "sppo_hard":
                return (c - 1 / (2 * beta)).square() + (r + 1 / (2 * beta)).square()
            case "nca_pair":
                return (
                    -logsigmoid(beta * c)
                    - 0.5 * logsigmoid(-beta * c)
                    - 0.5 * logsigmoid(-beta * r)
                )
            case "kto_pair":
                raise AssertionError("kto_pair is KTOPair's")


class KTOPair(DPO):
    """Compares every answer with the mean gain of the opposite side over the whole step; gradients also flow through that mean."""

    scope: Literal["row", "step"] = "step"

    def survey(self, out: ModelOut, batch: Batch) -> Tensor:
        """Gains of every pair, and whether it is one: [rows * pairs of a row, 3]."""
        return _gains(self.pairs(out, batch))

    def per_pair(self, pairs: Pairs, at: StepInfo) -> Tensor:
        """Means enter as constants; an added term of value zero carries their gradient."""
        c, r, is_pair = (_gains(pairs).detach() if at.survey is None else at.survey).unbind(1)
        beta, count = self.config.beta, is_pair.sum().clamp(min=1)
        mean_c, mean_r = (c * is_pair).sum() / count, (r * is_pair).sum() / count
        clamped_c, clamped_r = mean_c.clamp(min=0), mean_r.clamp(min=0)
        up, down = (beta * (c - clamped_r)).sigmoid(), (beta * (clamped_c - r)).sigmoid()
        # how the step's loss changes with each mean; below zero the clamp holds it
        by_c = -(beta * down * (1 - down) * is_pair).sum() / (2 * count) * (mean_c >= 0)
        by_r = (beta * up * (1 - up) * is_pair).sum() / (2 * count) * (mean_r >= 0)
        own = (
            2
            - (beta * (pairs.chosen_gain - clamped_r)).sigmoid()
            - (beta * (clamped_c - pairs.rejected_gain)).sigmoid()
        )
        through = by_c * (pairs.chosen_gain - pairs.chosen_gain.detach()) + by_r * (
            pairs.rejected_gain - pairs.rejected_gain.detach()
        )
        return own / 2 + through


def _gains(pairs: Pairs) -> Tensor:
    import torch

    return torch.stack([pairs.chosen_gain, pairs.rejected_gain, pairs.is_pair], dim=-1).flatten(
        0, 1
    )

"""KTO: learns from answers labelled good or bad, without pairs. Against a frozen reference, good ones should gain and bad ones lose.

In: rows of labelled answers and their mismatches (data/unpaired.py), and the reference's log-probabilities of both; out: one term over
records. With g the log-probability of an answer minus the reference's, and k the mean of that over the mismatches of the whole step, not
below 0 and without gradient:

    good      w (1 - s(b (g - k)))        w: desirable_weight, b: beta, s: the logistic function
    bad       v (1 - s(b (k - g)))        v: undesirable_weight

The mean needs a pass without gradients over the mismatches of all microbatches and ranks before the first loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from headway.config.section import setting
from headway.objective.base import (
    Collectives,
    Loss,
    MetricSums,
    ObjectiveConfig,
    ReferenceSpec,
    StepInfo,
    Term,
)
from headway.objective.pairs import REFERENCE, document_sums, share_right

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut

MISMATCH_REFERENCE = "mismatch.reference"
"""The column of a batch with the reference's log-probability of every mismatch: [rows, documents of a row]."""


class Config(ObjectiveConfig):
    """Settings of KTO."""

    UNPAIRED: ClassVar[bool] = True
    kind: str = setting("kto", "kto.", on_resume="fixed")
    beta: float = setting(
        0.1,
        "How strongly the model is kept near the reference; a smaller value lets it move further.",
        gt=0,
    )
    desirable_weight: float = setting(1.0, "Weight of the loss of good answers.", ge=0)
    undesirable_weight: float = setting(
        1.0, "Weight of the loss of bad answers; lower it where there are many more of them.", ge=0
    )
    reference: str | None = setting(
        None,
        "The reference model: a run, a checkpoint or a Hugging Face folder; null = the weights the run starts from.",
        on_resume="fixed",
    )
    reference_logps: Literal["live", "cached"] = setting(
        "live",
        "live: keep the reference as a second model. cached: score the records it reads once and store the results in data.cache_dir.",
    )

    @property
    def reference_spec(self) -> ReferenceSpec | None:
        """The frozen model to compare with."""
        return ReferenceSpec(self.reference, self.reference_logps == "cached")

    def build(self) -> KTO:
        """Make the objective."""
        return KTO(self)


class KTO:
    """The loss of each labelled answer, against the divergence that the mismatches of the step show."""

    scope: Literal["row", "step"] = "step"
    module: nn.Module | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def surveyed_rows(self, batch: Batch) -> Batch:
        """The mismatches of a microbatch."""
        from headway.data.unpaired import mismatched

        return mismatched(batch)

    def survey(self, out: ModelOut, batch: Batch) -> Tensor:
        """Of every place for a record: the gain of its mismatch, whether it has one, whether its answer is good, and bad; [n, 4]."""
        import torch

        _, gain, has_answer = _gains(out, batch, batch.extra[MISMATCH_REFERENCE])
        good, bad = _labels(batch, gain)
        return torch.stack([gain, has_answer * (good + bad), good, bad], dim=-1).flatten(0, 1)

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The loss of every record."""
        assert at.survey is not None, "the mismatches of the whole step come first"
        log_prob, gain, _ = _gains(out, batch, batch.extra[REFERENCE])
        good, bad = _labels(batch, gain)
        mismatch, has_mismatch, *_ = at.survey.unbind(1)
        kl = ((mismatch * has_mismatch).sum() / has_mismatch.sum().clamp(min=1)).clamp(min=0)
        beta, each = (
            self.config.beta,
            good * self.config.desirable_weight + bad * self.config.undesirable_weight,
        )
        margin = beta * (gain - kl) * (good - bad)
        total = (each * (1 - margin.sigmoid())).sum()
        metrics = self._metrics(log_prob.detach(), gain.detach(), (good, bad), kl, at)
        return Loss(
            {"kto": Term(total, per="records")},
            metrics if at.training else {"loss": (total, (good + bad).sum()), **metrics},
        )

    def _metrics(
        self,
        log_prob: Tensor,
        gain: Tensor,
        labels: tuple[Tensor, Tensor],
        kl: Tensor,
        at: StepInfo,
    ) -> MetricSums:
        """Rewards are gains times beta. A margin is the difference of two means over the step, of which this is a share."""
        good, bad = labels
        assert at.survey is not None
        all_good, all_bad = at.survey[:, 2].sum(), at.survey[:, 3].sum()
        reward, count = self.config.beta * gain, (good + bad).sum()
        right = share_right(gain - kl) * good + share_right(kl - gain) * bad
        margin = (reward * good).sum() / all_good.clamp(min=1) - (
            reward * bad
        ).sum() / all_bad.clamp(min=1)
        has_both = ((all_good > 0) & (all_bad > 0)).to(gain.dtype)
        return {
            "rewards/chosen": ((reward * good).sum(), good.sum()),
            "rewards/rejected": ((reward * bad).sum(), bad.sum()),
            "rewards/accuracies": (right.sum(), count),
            "rewards/margins": (
                margin * has_both,
                count / (all_good + all_bad).clamp(min=1) * has_both,
            ),
            "logps/chosen": ((log_prob * good).sum(), good.sum()),
            "logps/rejected": ((log_prob * bad).sum(), bad.sum()),
            "kl": (kl * count, count),
        }


def _gains(out: ModelOut, batch: Batch, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every document: the log-probability of its answer, the same minus the reference's, and whether it has an answer."""
    per_token, _ = out.head.scores(batch.targets)
    log_prob = document_sums(per_token * batch.loss_weight, batch)
    has_answer = (document_sums(batch.loss_weight, batch) > 0).to(log_prob.dtype)
    return log_prob, log_prob - reference.to(log_prob.dtype), has_answer


def _labels(batch: Batch, like: Tensor) -> tuple[Tensor, Tensor]:
    """1 where an answer is good, and 1 where one is bad."""
    from headway.data.unpaired import LABEL

    label = batch.extra[LABEL]
    return (label == 1).to(like.dtype), (label == 0).to(like.dtype)

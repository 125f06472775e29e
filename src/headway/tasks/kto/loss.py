"""KTO: learns from answers labelled good or bad, without pairs. Against a frozen reference, good
ones should gain and bad ones lose.

In: rows of labelled answers and their KL completions (source.py), and the reference's
log-probabilities of both; out: one term over records (Ethayarajh et al. 2024, arXiv:2402.01306; the
same numbers as TRL's KTOTrainer). With g the log-probability of an answer minus the reference's,
and k the mean of that over the KL completions of the whole step, not below 0 and without gradient:

    good      w (1 - s(b (g - k)))        w: desirable_weight, b: beta, s: the logistic function
    bad       v (1 - s(b (k - g)))        v: undesirable_weight

The mean needs a pass without gradients over the KL completions of all microbatches and ranks before
the first loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from headway.tasks.base import Collectives, FirstPass, Loss, MetricSums, StepInfo, Term
from headway.tasks.kto.source import LABEL, RECORD, kl_completions
from headway.tasks.preference.loss import REFERENCE, share_right

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut
    from headway.tasks.kto import Config

KL_REFERENCE = "mismatch.reference"
"""The column of a batch with the reference's log-probability of every KL completion: [rows,
documents of a row]."""
KL_COMPLETIONS = "mismatches"
"""The name of the first pass over KL completions."""


class RecordColumns:
    """A reference's log-probabilities of records and of their KL completions; the two numbers of a
    record in a table."""

    number = RECORD

    def scored(self, batch: Batch) -> dict[str, Batch]:
        """The records, and their KL completions."""
        return {REFERENCE: batch, KL_REFERENCE: kl_completions(batch)}

    def to_table(self, columns: Mapping[str, Tensor], places: int) -> Tensor:
        """[rows, records of a row, 2]: the record's log-probability, then its KL completion's."""
        import torch

        return torch.stack([columns[REFERENCE], columns[KL_REFERENCE]], dim=-1)

    def from_table(self, scores: Tensor) -> dict[str, Tensor]:
        """Both columns, [rows, records of a row] each."""
        return {REFERENCE: scores[..., 0], KL_REFERENCE: scores[..., 1]}


class KTO:
    """The loss of each labelled answer, against the divergence that the KL completions of the step
    show."""

    scope: Literal["row", "step"] = "step"
    module: nn.Module | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def first_passes(self) -> tuple[FirstPass, ...]:
        """The KL completions of the whole step: their mean gain is the divergence that every loss
        is measured against."""
        return (FirstPass(KL_COMPLETIONS, self.read_kl_completions, rows=kl_completions),)

    def read_kl_completions(self, out: ModelOut, batch: Batch) -> Tensor:
        """Of every place for a record: the gain of its KL completion, whether it has one, whether
        its answer is good, and bad; [n, 4]."""
        import torch

        _, gain, has_answer = _gains(out, batch, batch.extra[KL_REFERENCE])
        good, bad = _labels(batch, gain)
        return torch.stack([gain, has_answer * (good + bad), good, bad], dim=-1).flatten(0, 1)

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The loss of every record, by the formulas at the top; the KL estimate is that of the
        step."""
        # The mean over the step, not the microbatch: accumulation and ranks must not change the
        # estimate. No gradient flows through it, as in the paper.
        kl_gain, has_completion, *_ = at.seen[KL_COMPLETIONS].values.unbind(1)
        kl = ((kl_gain * has_completion).sum() / has_completion.sum().clamp(min=1)).clamp(min=0)

        log_prob, gain, _ = _gains(out, batch, batch.extra[REFERENCE])
        good, bad = _labels(batch, gain)
        weight = good * self.config.desirable_weight + bad * self.config.undesirable_weight
        # 1 - s(b (k - g)) of a bad answer is 1 - s(-b (g - k)): one formula with a sign.
        # good - bad is the sign of a record, and 0 where there is none
        margin = self.config.beta * (gain - kl) * (good - bad)
        total = (weight * (1 - margin.sigmoid())).sum()

        metrics = self._metrics(log_prob.detach(), gain.detach(), (good, bad), kl, at)
        if not at.training:
            metrics = {"loss": (total, (good + bad).sum()), **metrics}
        return Loss({"kto": Term(total, per="records")}, metrics)

    def _metrics(
        self,
        log_prob: Tensor,
        gain: Tensor,
        labels: tuple[Tensor, Tensor],
        kl: Tensor,
        at: StepInfo,
    ) -> MetricSums:
        """Rewards are gains times beta. A margin is the difference of two means over the step, of
        which this is a share."""
        good, bad = labels
        seen = at.seen[KL_COMPLETIONS].values
        # Counts of the whole step, from the first pass: a mean over the step cannot be built from
        # the labels of one microbatch.
        all_good = seen[:, 2].sum()
        all_bad = seen[:, 3].sum()
        reward = self.config.beta * gain
        count = (good + bad).sum()
        right = share_right(gain - kl) * good + share_right(kl - gain) * bad
        good_mean = (reward * good).sum() / all_good.clamp(min=1)
        bad_mean = (reward * bad).sum() / all_bad.clamp(min=1)
        margin = good_mean - bad_mean
        # a step with answers of one kind has no margin: it counts with weight 0
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
    """Of every document: the log-probability of its answer, the same minus the reference's, and
    whether it has an answer."""
    per_token, _ = out.head.scores(batch.targets)
    log_prob = batch.sum_documents(per_token * batch.loss_weight)
    # A document without a loss target is an empty slot.
    has_answer = (batch.sum_documents(batch.loss_weight) > 0).to(log_prob.dtype)
    return log_prob, log_prob - reference.to(log_prob.dtype), has_answer


def _labels(batch: Batch, like: Tensor) -> tuple[Tensor, Tensor]:
    """1 where an answer is good, and 1 where one is bad; both 0 in an empty slot (label -1)."""
    label = batch.extra[LABEL]
    return (label == 1).to(like.dtype), (label == 0).to(like.dtype)

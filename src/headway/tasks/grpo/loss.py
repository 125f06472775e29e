"""The loss of sampled answers: a model's output and the columns of rollouts come in, additive terms
go out.

With lp the model's log-probability of a sampled token in the distribution it was drawn from, old the
trainer's before the first update on these answers (lp itself in that update), mu the sampler's, A
the advantage and w the weight of a token:

    r    = exp(lp - old)                  token;  sequence: exp(mean over the answer);  whole: exp(sum)
    i    = min(cap, exp(old - mu))        importance weight, without gradient
    loss = -w i min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    loss = -w i min(r, clip_high) A lp                                       cispo, r without gradient
    A   <- A + teacher_weight (lp_teacher - old)                             with a teacher
    kl   = beta w k(lp_reference - lp)                                       with a reference

    w    = 1 / tokens of the answer, per answers        weighting answer
           1 / longest answer, per answers              longest
           1, per targets                               token

A term's sum is divided by the total of the whole step, so microbatches, packing and ranks change
nothing. Shapes: B rows, T tokens of a row, S documents of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.tasks.base import LARGEST, Collectives, Loss, MetricSums, StepInfo, Term
from headway.tasks.grpo import (
    ADVANTAGE,
    AGREEMENT,
    ANSWERS,
    DIFFERING,
    KEPT,
    OLD,
    SAMPLED,
    SCORED,
    Config,
)
from headway.tasks.preference.loss import document_sums

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.kernels.policy_scores import DrawnFrom
    from headway.model.base import ModelOut

MOST_LOG_RATIO = 30.0
"""exp() of a larger difference would overflow to inf, and inf * 0 is NaN."""


class PolicyTask:
    """Terms `policy`, and `kl` and `entropy` where they have a weight."""

    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(
        self,
        config: Config,
        drawn: DrawnFrom | None = None,
        longest: int = 1,
        *,
        exact: bool = False,
    ) -> None:
        """`drawn`: the distribution of the answers' tokens; None: the model's own. `longest`:
        tokens of the longest answer there may be. `exact`: count tokens whose bits differ."""
        from headway.kernels.policy_scores import DrawnFrom

        self.config = config
        self.parts = config.parts
        self.drawn = drawn or DrawnFrom()
        self.longest = longest
        self.exact = exact

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The terms of one microbatch."""
        import torch

        mask = batch.loss_weight
        scores = out.head.policy(batch.targets, self.drawn, batch.extra.get(KEPT))
        # Beside answers there is nothing to learn, and no number that may be used.
        log_prob = torch.where(mask > 0, scores.log_prob, 0.0)
        old = batch.extra.get(OLD)
        if old is None:
            old = log_prob.detach()
        sampled = batch.extra[SAMPLED]
        scored = batch.extra.get(SCORED)
        if scored is not None:
            scored = torch.where(mask > 0, scored, 0.0)

        advantage = batch.extra[ADVANTAGE]
        if self.config.teacher is not None:
            assert scored is not None
            advantage = advantage + self.config.teacher_weight * (scored - old)
        lengths = document_sums(mask, batch)
        log_ratio = self._log_ratio(log_prob - old, mask, lengths, batch)
        ratio = log_ratio.clamp(max=MOST_LOG_RATIO).exp()
        importance = self._importance(old - sampled, mask, lengths, batch)

        clip_low = self.parts.clip_low
        if clip_low is None:
            value = ratio.detach().clamp(max=self.parts.clip_high) * advantage * log_prob
            is_low = torch.zeros_like(mask)
            is_high = (ratio > self.parts.clip_high).to(mask.dtype)
        else:
            clipped = ratio.clamp(1 - clip_low, 1 + self.parts.clip_high)
            value = torch.minimum(ratio * advantage, clipped * advantage)
            is_low = ((ratio < 1 - clip_low) & (advantage < 0)).to(mask.dtype)
            is_high = ((ratio > 1 + self.parts.clip_high) & (advantage > 0)).to(mask.dtype)

        weight, per = self._weights(mask, lengths, batch)
        terms = {"policy": Term(-(weight * importance * value).sum(), per=per)}
        tokens = mask.sum()
        metrics: MetricSums = {
            "entropy": ((scores.entropy.detach() * mask).sum(), tokens),
            "clipped/low": ((is_low * mask).sum(), tokens),
            "clipped/high": ((is_high * mask).sum(), tokens),
            **self._agreement(old - sampled, importance, mask),
        }
        if scored is not None:
            kl = self._kl(scored - log_prob)
            metrics["kl"] = ((kl.detach() * mask).sum(), tokens)
            if self.config.beta and self.config.kl_in == "loss":
                terms["kl"] = Term((weight * kl).sum(), per=per, coefficient=self.config.beta)
        if self.config.entropy:
            terms["entropy"] = Term(
                (scores.entropy * mask).sum(), per="targets", coefficient=-self.config.entropy
            )
        return Loss(terms, metrics)

    def _log_ratio(self, difference: Tensor, mask: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
        """log r of every token [B,T]; of all tokens of an answer the same unless `ratio` is
        token."""
        if self.parts.ratio == "token":
            return difference
        sums = document_sums(difference * mask, batch)
        if self.parts.ratio == "sequence":
            sums = sums / lengths.clamp(min=1)
        return _per_token(sums, batch)

    def _importance(
        self, difference: Tensor, mask: Tensor, lengths: Tensor, batch: Batch
    ) -> Tensor:
        """The weight that corrects for the sampler's arithmetic, [B,T]; no gradient."""
        import torch

        if self.config.importance == "off":
            return torch.ones_like(difference)
        difference = difference.detach() * mask
        if self.config.importance == "sequence":
            difference = _per_token(document_sums(difference, batch), batch)
        return difference.clamp(max=MOST_LOG_RATIO).exp().clamp(max=self.config.importance_cap)

    def _weights(self, mask: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, str]:
        """The weight of every token [B,T], and the total that the sum is divided by."""
        weighting = self.parts.weighting
        if weighting == "token":
            return mask, "targets"
        if weighting == "longest":
            return mask / self.longest, ANSWERS
        return mask / _per_token(lengths.clamp(min=1), batch), ANSWERS

    def _kl(self, difference: Tensor) -> Tensor:
        """The estimate of the KL divergence from d = log p_reference - log p, [B,T]."""
        if self.config.kl == "k1":
            return -difference
        if self.config.kl == "k2":
            return difference.square() / 2
        return difference.clamp(max=MOST_LOG_RATIO).exp() - difference - 1

    def _agreement(self, difference: Tensor, importance: Tensor, mask: Tensor) -> MetricSums:
        """How far trainer and sampler are apart on the tokens that were drawn."""
        distance = difference.detach().abs() * mask
        tokens = mask.sum()
        metrics: MetricSums = {
            AGREEMENT: (distance.sum(), tokens),
            f"agreement{LARGEST}": (distance.max(), tokens.new_ones(())),
        }
        if self.exact:
            differs = (difference.detach() != 0).to(mask.dtype)
            metrics[DIFFERING] = ((differs * mask).sum(), tokens)
        if self.config.importance != "off":
            is_cut = (importance >= self.config.importance_cap).to(mask.dtype)
            metrics["agreement/cut"] = ((is_cut * mask).sum(), tokens)
        return metrics


def _per_token(per_document: Tensor, batch: Batch) -> Tensor:
    """Give every token the value of its document: [B,S] -> [B,T]."""
    return per_document.gather(1, batch.document.long())

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

Sources: the clipped loss of a token's ratio is that of PPO (Schulman 2017, arXiv:1707.06347), with
one advantage for all tokens of an answer in GRPO (2402.03300). A clip_high above clip_low and the
weight 1 of every token are DAPO's (2503.14476), the division by a constant length is Dr. GRPO's
(2503.20783), the ratio of a whole answer to the power 1 / length GSPO's (2507.18071), and the
clipped ratio as a weight of log-probabilities CISPO's (2506.13585). k1, k2 and k3 are named as in
Schulman 2020, "Approximating KL Divergence".

A term's sum is divided by the total of the whole step, so microbatches, packing and ranks change
nothing. Shapes: B rows, T tokens of a row, S documents of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.data.batch import ANSWERS
from headway.tasks.answers import AnswerSampling, SampledTokens
from headway.tasks.base import Collectives, Loss, MetricSums, StepInfo, Term
from headway.tasks.grpo import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headway.data.batch import Batch
    from headway.model.base import ModelOut

MOST_LOG_RATIO = 30.0
"""exp() of a larger difference would overflow to inf, and inf * 0 is NaN."""


class PolicyTask:
    """Terms `policy`, and `kl` and `entropy` where they have a weight."""

    scope: Literal["row", "step"] = "row"
    module: nn.Module | None = None

    def __init__(self, config: Config, sampling: AnswerSampling) -> None:
        self.config = config
        self.parts = config.parts
        self.sampling = sampling

    def loss(self, out: ModelOut, batch: Batch, at: StepInfo, collectives: Collectives) -> Loss:
        """The terms of one microbatch."""
        import torch

        answers = SampledTokens.read(out, batch, self.sampling)
        mask = answers.mask
        log_prob = answers.log_prob
        old = answers.old
        scored = answers.scored

        advantage = answers.advantage
        # With A = log p_teacher - log p of a sampled token, the policy gradient is that of
        # -KL(policy || teacher). Neither number carries a gradient.
        if self.config.teacher is not None:
            assert scored is not None
            advantage = advantage + self.config.teacher_weight * (scored - old)
        lengths = batch.sum_documents(mask)
        log_ratio = self._log_ratio(log_prob - old, mask, lengths, batch)
        ratio = log_ratio.clamp(max=MOST_LOG_RATIO).exp()
        importance = self._importance(old - answers.sampled, mask, batch)

        clip_low = self.parts.clip_low
        if clip_low is None:
            # CISPO: the cut ratio is a weight, so every token keeps the gradient of its
            # log-probability. Under the other rule a token beyond the clip has none.
            value = ratio.detach().clamp(max=self.parts.clip_high) * advantage * log_prob
            is_low = torch.zeros_like(mask)
            is_high = (ratio > self.parts.clip_high).to(mask.dtype)
        else:
            # The lower of both values: a ratio beyond the clip gains nothing more, and still loses.
            # A token counts as clipped where that took its gradient: the side depends on A's sign.
            clipped = ratio.clamp(1 - clip_low, 1 + self.parts.clip_high)
            value = torch.minimum(ratio * advantage, clipped * advantage)
            is_low = ((ratio < 1 - clip_low) & (advantage < 0)).to(mask.dtype)
            is_high = ((ratio > 1 + self.parts.clip_high) & (advantage > 0)).to(mask.dtype)

        weight, per = self._weights(mask, lengths, batch)
        terms = {"policy": Term(-(weight * importance * value).sum(), per=per)}
        tokens = mask.sum()
        metrics: MetricSums = {
            "entropy": ((answers.entropy.detach() * mask).sum(), tokens),
            "clipped/low": ((is_low * mask).sum(), tokens),
            "clipped/high": ((is_high * mask).sum(), tokens),
            **self._agreement(answers, importance),
        }
        if scored is not None:
            kl = self._kl(scored - log_prob)
            metrics["kl"] = ((kl.detach() * mask).sum(), tokens)
            if self.config.beta and self.config.kl_in == "loss":
                terms["kl"] = Term((weight * kl).sum(), per=per, coefficient=self.config.beta)
        if self.config.entropy:
            terms["entropy"] = Term(
                (answers.entropy * mask).sum(), per="targets", coefficient=-self.config.entropy
            )
        return Loss(terms, metrics)

    def _log_ratio(self, difference: Tensor, mask: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
        """log r of every token [B,T]; of all tokens of an answer the same unless `ratio` is
        token."""
        if self.parts.ratio == "token":
            return difference
        sums = batch.sum_documents(difference * mask)
        if self.parts.ratio == "sequence":
            # Padding is a document without a target: its length of 0 must not divide.
            sums = sums / lengths.clamp(min=1)
        return batch.per_token(sums)

    def _importance(self, difference: Tensor, mask: Tensor, batch: Batch) -> Tensor:
        """The weight that corrects for the sampler's arithmetic, [B,T]; no gradient."""
        import torch

        if self.config.importance == "off":
            return torch.ones_like(difference)
        difference = difference.detach() * mask
        # exp(sum) is the exact weight of an answer, and of a high variance; a weight for each token
        # has a bias and a lower variance.
        if self.config.importance == "sequence":
            difference = batch.per_token(batch.sum_documents(difference))
        return difference.clamp(max=MOST_LOG_RATIO).exp().clamp(max=self.config.importance_cap)

    def _weights(self, mask: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, str]:
        """The weight of every token [B,T], and the total that the sum is divided by."""
        weighting = self.parts.weighting
        if weighting == "token":
            return mask, "targets"
        # The same number for all answers: their own length would favour long answers that are wrong.
        if weighting == "longest":
            return mask / self.sampling.longest, ANSWERS
        return mask / batch.per_token(lengths.clamp(min=1)), ANSWERS

    def _kl(self, difference: Tensor) -> Tensor:
        """The estimate of the KL divergence from d = log p_reference - log p, [B,T]: -d (k1), d^2 / 2
        (k2), or e^d - d - 1 (k3), which is never negative and has the mean of k1."""
        if self.config.kl == "k1":
            return -difference
        if self.config.kl == "k2":
            return difference.square() / 2
        return difference.clamp(max=MOST_LOG_RATIO).exp() - difference - 1

    def _agreement(self, answers: SampledTokens, importance: Tensor) -> MetricSums:
        """How far trainer and sampler are apart, and how often the correction for it is cut."""
        metrics = answers.agreement()
        if self.config.importance != "off":
            is_cut = (importance >= self.config.importance_cap).to(answers.mask.dtype)
            metrics["agreement/cut"] = ((is_cut * answers.mask).sum(), answers.mask.sum())
        return metrics

"""Log-probabilities and entropies on the output head for losses over sampled tokens: hidden [N,D]
and weight [V,D] come in, two numbers per token go out; logits [N,V] never exist.

With logits x_j, temperature T, y_j = x_j / T, p = softmax(y) and the target t:

    log_prob = y_t - lse(y)                  the distribution that was sampled from, not softmax(x)
    entropy  = lse(y) - sum_j p_j y_j

    d log_prob / d x_j = ([j = t] - p_j) / T
    d entropy  / d x_j = -p_j (log p_j + entropy) / T

Both are differentiable in any way: the backward pass computes the logits again, chunk by chunk.
Models pad their vocabulary, and samplers never draw an id that the tokenizer lacks: ids from
`vocab` on have no probability here either. Where top-k, top-p or min-p cut the distribution, `kept`
has the ids that the sampler drew from: all others have no probability, and all sums go over those
that are kept. With a `VocabShard`, weight holds this rank's rows of the head; targets and kept ids
count all of them.

Shapes: N tokens, D width, V vocabulary (of this rank), K kept ids. Softmax arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.kernels.cross_entropy import accumulate_outer
from headway.kernels.row_blocks import row_log_probs, row_logits
from headway.kernels.vocab_loss import VocabShard, add_at_target, cap_in_place, token_scores

NEVER = -1e30
"""The logit of padding. Not -inf: a rank may have nothing but padding, and inf - inf is NaN."""


class DrawnFrom(NamedTuple):
    """The distribution that tokens were drawn from."""

    temperature: float = 1.0
    vocab: int | None = None
    """Ids from here on are padding of the head, and never drawn; None: there is no padding."""


class PolicyScores(NamedTuple):
    """What a head says of sampled tokens; both carry gradients."""

    log_prob: Tensor
    """Log-probability of the target."""
    entropy: Tensor
    """Entropy of the distribution that the target was drawn from."""


class _PolicyScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        drawn: DrawnFrom,
        chunk: int,
        shard: VocabShard | None,
        softcap: float | None,
        is_exact: bool,
    ) -> tuple[Tensor, Tensor]:
        size = hidden.shape[0]
        first = 0 if shard is None else shard.first
        padding = _padding(drawn.vocab, first, weight.shape[0])
        temperature = drawn.temperature
        log_prob = torch.empty(size, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(log_prob)
        lse = torch.empty_like(log_prob)
        for start in range(0, size, chunk):
            part = slice(start, min(start + chunk, size))
            if is_exact:
                y = row_logits(hidden[part], weight)
            else:
                y = (hidden[part] @ weight.t()).float()
            cap_in_place(y, softcap)
            if temperature != 1.0:
                y.div_(temperature)
            y[:, padding] = NEVER
            if kept is not None:
                y.masked_fill_(_is_cut(kept[part], first, weight.shape[0]), NEVER)
            if shard is None:
                part_lse = torch.logsumexp(y, -1)
                at_target = y.gather(1, targets[part, None]).squeeze(1)
                mean = _expectation(y, part_lse)
            else:
                scores = token_scores(y, targets[part], shard)
                part_lse = scores.lse
                at_target = scores.at_target
                # Every rank adds what its rows contribute to the expectation.
                mean = shard.collect(_expectation(y, part_lse)).sum(0)
            lse[part] = part_lse
            if is_exact:
                log_prob[part] = row_log_probs(y, targets[part])
            else:
                log_prob[part] = at_target - part_lse
            entropy[part] = part_lse - mean
        ctx.save_for_backward(hidden, weight, targets, lse, entropy, kept)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.softcap = softcap
        ctx.first = None if shard is None else shard.first
        ctx.padding = padding
        # A loss that does not use the entropy gets None for its gradient, and no work is done.
        ctx.set_materialize_grads(False)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, weight, targets, lse, entropy, kept = ctx.saved_tensors
        d_log_prob, d_entropy = grads
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = None
        if needs_hidden:
            d_hidden = torch.empty_like(hidden)
        d_weight = None
        if needs_weight:
            d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        if d_log_prob is None:
            d_log_prob = torch.zeros_like(lse)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, min(start + ctx.chunk, hidden.shape[0]))
            y = (hidden[part] @ weight.t()).float()
            slope = cap_in_place(y, ctx.softcap)
            if ctx.temperature != 1.0:
                y.div_(ctx.temperature)
            y[:, ctx.padding] = NEVER
            if kept is not None:
                y.masked_fill_(_is_cut(kept[part], ctx.first or 0, weight.shape[0]), NEVER)
            log_p = y.sub_(lse[part, None])
            gradient = log_p.exp()
            if d_entropy is None:
                gradient.mul_(-d_log_prob[part, None])
            else:
                log_p.add_(entropy[part, None]).mul_(d_entropy[part, None])
                gradient.mul_(-(log_p + d_log_prob[part, None]))
            if ctx.first is None:
                gradient.scatter_add_(1, targets[part, None], d_log_prob[part, None])
            else:
                # On a shard of the vocabulary the target may be another rank's.
                add_at_target(gradient, targets[part] - ctx.first, d_log_prob[part])
            if ctx.temperature != 1.0:
                gradient.div_(ctx.temperature)
            if slope is not None:
                gradient.mul_(slope)
            gradient = gradient.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(gradient, weight, out=d_hidden[part])
            if d_weight is not None:
                accumulate_outer(d_weight, gradient, hidden[part])
        return d_hidden, d_weight, *(None,) * 7


def _expectation(y: Tensor, lse: Tensor) -> Tensor:
    """sum_j p_j y_j of logits [n,V], p = exp(y - lse)."""
    return (y - lse[:, None]).exp_().mul_(y).sum(-1)


def _padding(vocab: int | None, first: int, rows: int) -> slice:
    """The rows of the head at hand, the first of which is id `first`, that are no ids."""
    if vocab is None:
        return slice(rows, rows)
    return slice(min(max(vocab - first, 0), rows), rows)


def _is_cut(kept: Tensor, first: int, rows: int) -> Tensor:
    """Which ids [n, rows of the head at hand] are not among kept ones [n,K]. A token without kept
    ids, all -1, was drawn from all of them."""
    is_cut = torch.ones(len(kept), rows + 1, dtype=torch.bool, device=kept.device)
    # The row behind the last takes the -1 and the ids of other ranks.
    here = kept.long() - first
    is_elsewhere = (kept < 0) | (here < 0) | (here >= rows)
    is_cut.scatter_(1, here.masked_fill(is_elsewhere, rows), False)
    return is_cut[:, :rows] & (kept >= 0).any(1, keepdim=True)


def linear_policy_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    drawn: DrawnFrom = DrawnFrom(),
    chunk_tokens: int = 2048,
    shard: VocabShard | None = None,
    softcap: float | None = None,
    kept: Tensor | None = None,
    *,
    is_exact: bool = False,
) -> PolicyScores:
    """Log-probabilities and entropies of targets [N] in the distribution they were drawn from.

    `kept`, int [N,K]: the ids that it was cut to, -1 behind the last; None: it was not cut.
    `is_exact`: in the bits that the inference engine gives them; without `shard` and `softcap`."""
    scores = _PolicyScores.apply(
        hidden, weight, targets, kept, drawn, chunk_tokens, shard, softcap, is_exact
    )
    return PolicyScores(*scores)  # pyright: ignore[reportGeneralTypeIssues]

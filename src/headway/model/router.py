"""The router of a mixture of experts: tokens come in; logits, scores, the chosen experts and their
weights go out, all in fp32.

    x [B,T,D] -> logits [B,T,E] -> scores [B,T,E] -> the k best experts and their weights [B,T,k]

fp32 whatever the dtype of the model: in bf16 many scores would tie, and another rounding on another
machine would choose other experts.

`Routing` sums up what a router did, for the balancing losses (`tasks/balance.py`) and for metrics.
Shapes: B rows, T tokens, D width, E experts, k experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from headway.data.batch import Batch
    from headway.model.config import ModelConfig

SMALLEST_SUM = 1e-20
"""Sums of scores are divided by at least this: all sigmoids of a token may underflow to 0."""


class Routing(NamedTuple):
    """What one layer's router did with the counted tokens of each row, as sums over them; fp32."""

    load: Tensor
    """[B,E]: tokens that chose each expert; no gradient"""
    probability: Tensor
    """[B,E]: scores of each expert, normalized so that those of a token add up to 1"""
    z: Tensor
    """[B]: squared log-partition of the logits"""
    entropy: Tensor
    """[B]: entropy of a token's scores; no gradient"""


class Router(nn.Module):
    """Logits of every expert, in fp32 for any dtype of the model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        num = config.experts.num
        self.weight = nn.Parameter(torch.empty(num, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(num)) if config.experts.router_bias else None
        self.e_score_correction_bias: nn.Parameter | None = None
        """Added to the scores by which experts are chosen; it has no gradient (see `balance`)."""
        if config.experts.bias_rate is not None:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(num), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [...,E] of x [...,D]."""
        bias = None
        if self.bias is not None:
            bias = self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias)

    def scores(self, logits: Tensor) -> Tensor:
        """Scores of logits [...,E], fp32."""
        if self.config.router == "softmax":
            return torch.softmax(logits, dim=-1)
        return torch.sigmoid(logits)

    def choose(self, scores: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(experts [...,k], weights [...,k]) of scores [...,E]; the first of equal experts comes
        first. `given` [...,k]: experts that were chosen before and are taken again; -1 where this
        router chooses."""
        # The balancing bias decides which experts are chosen, not how much they weigh.
        choice = scores.detach()
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        if self.config.num_groups > 1:
            choice = self._in_best_groups(choice)
        chosen = torch.topk(choice, self.config.per_token, dim=-1).indices
        if given is not None:
            chosen = torch.where(given >= 0, given.long(), chosen)

        weights = scores.gather(-1, chosen)
        if self.config.normalize:
            total = weights.sum(-1, keepdim=True)
            if self.config.sum_offset:
                total = total + self.config.sum_offset
            weights = weights / total.clamp(min=SMALLEST_SUM)
        if self.config.routed_scale != 1.0:
            weights = weights * self.config.routed_scale
        return chosen, weights

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """The scores [...,E] of experts in the best groups of each token; -inf for the others."""
        groups = choice.unflatten(-1, (self.config.num_groups, -1))
        if self.config.group_score == "top2":
            group_scores = groups.topk(2, dim=-1).values.sum(-1)
        else:
            group_scores = groups.amax(-1)
        best = group_scores.topk(self.config.groups_per_token, dim=-1).indices
        is_excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(is_excluded[..., None], -torch.inf).flatten(-2)

    @torch.no_grad()
    def balance(self, load: Tensor, keep: Tensor) -> None:
        """bias += rate * sign(mean load - load), for the load [E] of the whole step (Wang 2024,
        DeepSeek-V3).

        `keep` is 0 for a step that was skipped, else 1: a product, so that the host need not know.
        """
        bias = self.e_score_correction_bias
        rate = self.config.bias_rate
        # A rate of 0 keeps the biases of a published model as they are.
        if bias is not None and rate:
            bias += keep * rate * torch.sign(load.mean() - load)


def summarize(logits: Tensor, scores: Tensor, taken: Tensor, counted: Tensor) -> Routing:
    """What a router did with the counted tokens [B,T]; `taken` [B,T,E] is 1 where a token chose
    an expert."""
    # Sums over the tokens of a row, not means: the step's mean is known only after all ranks.
    weight = counted[..., None]
    shares = scores / scores.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    z = torch.logsumexp(logits, dim=-1).square()
    with torch.no_grad():
        entropy = torch.special.entr(shares).sum(-1)
    return Routing(
        (taken * weight).sum(-2),
        (shares * weight).sum(-2),
        (z * counted).sum(-1),
        (entropy * counted).sum(-1),
    )


def stack_routings(routings: list[Routing]) -> Routing:
    """What the routers of several layers did, in one tensor of each kind, [layers,B,...]."""
    return Routing(*(torch.stack(values) for values in zip(*routings, strict=True)))


def counted_tokens(batch: Batch) -> Tensor:
    """fp32 [B,T]: 1 for tokens of documents, 0 for padding."""
    # Padding is the last document of a row, and is recognised by having only zeros and no targets.
    in_last = batch.document == batch.document[:, -1:]
    is_text = ((batch.tokens != 0) | (batch.loss_weight != 0)) & in_last
    return (~in_last | is_text.any(1, keepdim=True)).float()

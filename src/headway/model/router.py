"""The router of a mixture of experts: tokens come in; logits, scores, the chosen experts and their weights go out, all in fp32.

    x [B,T,D] -> logits [B,T,E] -> scores [B,T,E] -> the k best experts and their weights [B,T,k]

`Routing` sums up what a router did, for the losses of balance (`tasks/balance.py`) and for metrics.
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


class Routing(NamedTuple):
    """What one layer's router did with the counted tokens of each row, as sums over them; fp32."""

    load: Tensor
    """[B,E]: tokens that chose each expert; no gradient"""
    probability: Tensor
    """[B,E]: scores of each expert, those of a token adding up to 1"""
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
        self.weight = nn.Parameter(torch.empty(config.experts.num, config.hidden_size))
        self.bias = (
            nn.Parameter(torch.zeros(config.experts.num)) if config.experts.router_bias else None
        )
        biased = config.experts.bias_rate is not None
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.experts.num), requires_grad=False) if biased else None
        )
        """Added to the scores by which experts are chosen; it has no gradient (see `balance`)."""

    def forward(self, x: Tensor) -> Tensor:
        """[...,E] of x [...,D]."""
        return F.linear(
            x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
        )

    def scores(self, logits: Tensor) -> Tensor:
        """Scores of logits [...,E], fp32."""
        return (
            torch.softmax(logits, dim=-1)
            if self.config.router == "softmax"
            else torch.sigmoid(logits)
        )

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(experts [...,k], weights [...,k]) of scores [...,E]; the first of equal experts comes first."""
        bias = self.e_score_correction_bias
        choice = scores.detach() if bias is None else scores.detach() + bias
        if self.config.num_groups > 1:
            choice = self._in_best_groups(choice)
        chosen = torch.topk(choice, self.config.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return (
            chosen,
            weights if self.config.routed_scale == 1.0 else weights * self.config.routed_scale,
        )

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """The scores [...,E] of experts in the best groups of each token; -inf for the others."""
        groups = choice.unflatten(-1, (self.config.num_groups, -1))
        of_group = (
            groups.topk(2, dim=-1).values.sum(-1)
            if self.config.group_score == "top2"
            else groups.amax(-1)
        )
        best = of_group.topk(self.config.groups_per_token, dim=-1).indices
        out = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
        return groups.masked_fill(out[..., None], -torch.inf).flatten(-2)

    @torch.no_grad()
    def balance(self, load: Tensor, keep: Tensor) -> None:
        """Move the bias of each expert against its load [E] of the whole step; `keep` is 0 for a step that changes nothing."""
        bias, rate = self.e_score_correction_bias, self.config.bias_rate
        if bias is not None and rate:
            bias += keep * rate * torch.sign(load.mean() - load)


def summarize(logits: Tensor, scores: Tensor, taken: Tensor, counted: Tensor) -> Routing:
    """What a router did with the counted tokens [B,T]; `taken` [B,T,E] is 1 where a token chose an expert."""
    weight = counted[..., None]
    shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
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
    """What the routers of several layers did, in one tensor of each kind."""
    return Routing(*(torch.stack(values) for values in zip(*routings, strict=True)))


def counted_tokens(batch: Batch) -> Tensor:
    """fp32 [B,T]: 1 for tokens of documents, 0 for padding, which is the last document of a row where it has only zeros and no targets."""
    last = batch.document == batch.document[:, -1:]
    is_text = ((batch.tokens != 0) | (batch.loss_weight != 0)) & last
    return (~last | is_text.any(1, keepdim=True)).float()

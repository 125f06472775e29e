"""A mixture of experts in place of a feed-forward: the normed stream comes in, the sum of a few experts' results per token goes out.

    x [B,T,D] -> router (fp32) -> scores [B,T,E] -> the k best experts and their weights [B,T,k]            (router.py)
      -> dispatch: tokens sorted by expert, fixed shape [N*k]     -> expert_products                        (expert_products.py)
      -> each token adds up its k results                         (+ the shared expert, which every token passes)

Shapes: B rows, T tokens, N = B*T, D width, E experts, k experts per token, F inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headway.model.expert_products import Clamp, Dispatch, ExpertMatrix, dispatch, expert_products
from headway.model.layers import FeedForward
from headway.model.router import Router, Routing, summarize

if TYPE_CHECKING:
    from headway.model.config import ModelConfig


ExpertCall = Callable[[Tensor, Tensor, Dispatch], Tensor]
"""Tokens x [N,D], their weights fp32 [N,k] and the order in which experts see them -> the weighted sum of each token's experts, [N,D]."""


class ExpertLinear(nn.Module):
    """The same matrix of all experts, stacked."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None
        self.adds_bias = True
        """False on ranks whose results are added to one that adds it."""

    def matrix(self) -> ExpertMatrix:
        """What products need of it."""
        return ExpertMatrix(self.weight, self.bias if self.adds_bias else None)


class Experts(nn.Module):
    """SwiGLU of every expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        num, width, inner, bias = (
            config.experts.num,
            config.hidden_size,
            config.expert_size,
            config.experts.bias,
        )
        self.gate_proj = ExpertLinear(num, width, inner, bias=bias)
        self.up_proj = ExpertLinear(num, width, inner, bias=bias)
        self.down_proj = ExpertLinear(num, inner, width, bias=bias)
        limit, alpha = config.experts.swiglu_limit, config.experts.swiglu_alpha
        self.clamp = None if limit is None else Clamp(limit, alpha)

    def forward(self, x: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        """[N,D]: the weighted sum of the experts of each token x [N,D], with weights fp32 [N,k]."""
        return expert_products(
            x,
            weights,
            plan,
            self.gate_proj.matrix(),
            self.up_proj.matrix(),
            self.down_proj.matrix(),
            self.clamp,
        )


class MixtureOfExperts(nn.Module):
    """The feed-forward of a layer with experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        self.gate = Router(config)
        self.experts = Experts(config)
        self.exchange: ExpertCall | None = None
        """Called instead of the experts where other ranks hold some of them: tokens travel there and back."""
        self.shared_experts = (
            FeedForward(config, config.experts.shared_ffn_size)
            if config.experts.shared_ffn_size
            else None
        )

    def fuse(self) -> None:
        """Compute gate and up of the shared expert in one product; for inference."""
        if self.shared_experts is not None:
            self.shared_experts.fuse()

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,D]."""
        return self.route(x, None)[0]

    def route(self, x: Tensor, counted: Tensor | None) -> tuple[Tensor, Routing | None]:
        """The result [B,T,D], and what the router did with the tokens that count: `counted` is 1 for them, fp32 [B,T]."""
        logits = self.gate(x)
        scores = self.gate.scores(logits)
        chosen, weights = self.gate.choose(scores)
        taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0).detach()
        plan = dispatch(chosen.flatten(0, -2), taken.flatten(0, -2).sum(0))
        run = self.experts if self.exchange is None else self.exchange
        out = run(x.flatten(0, -2), weights.flatten(0, -2), plan).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, None if counted is None else summarize(logits, scores, taken, counted)

    def balance(self, load: Tensor, keep: Tensor) -> None:
        """Move the router's biases against the load [E] of the whole step; `keep` is 0 for a step that changes nothing."""
        self.gate.balance(load, keep)

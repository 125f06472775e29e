"""A mixture of experts in place of a feed-forward: the normed stream comes in, the weighted sum of
a few experts' results per token goes out.

    x [B,T,D] -> router (fp32) -> scores [B,T,E]
      -> the k best experts and their weights [B,T,k]             (router.py)
      -> dispatch: tokens sorted by expert, fixed shape [N*k]     (expert_products.py)
      -> expert_products: each token adds up its k results        (expert_products.py)
      -> plus the shared expert, which every token passes

Shapes: B rows, T tokens, N = B*T, D width, E experts, k experts per token, F inner width of an
expert.
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
"""Tokens x [N,D], their weights fp32 [N,k] and the order in which experts see them -> the
weighted sum of each token's experts, [N,D]."""


class ExpertLinear(nn.Module):
    """The same matrix of all experts, stacked."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(experts, outputs)) if bias else None
        self.adds_bias = True
        """False on ranks whose results are summed with those of a rank that adds the bias: it is
        added once."""

    def matrix(self) -> ExpertMatrix:
        """The tensors that products need; a linear with an adapter adds its own."""
        bias = self.bias if self.adds_bias else None
        return ExpertMatrix(self.weight, bias)


class Experts(nn.Module):
    """SwiGLU of every expert: down(silu(gate x) * up x), or its clamped form."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        num = config.experts.num
        width = config.hidden_size
        inner = config.expert_size
        bias = config.experts.bias
        self.gate_proj = ExpertLinear(num, width, inner, bias=bias)
        self.up_proj = ExpertLinear(num, width, inner, bias=bias)
        self.down_proj = ExpertLinear(num, inner, width, bias=bias)
        self.clamp = None
        if config.experts.swiglu_limit is not None:
            self.clamp = Clamp(config.experts.swiglu_limit, config.experts.swiglu_alpha)

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
        # `gate` is Hugging Face's name of the router; the gates of SwiGLU are `experts.gate_proj`.
        self.gate = Router(config)
        self.experts = Experts(config)
        self.exchange: ExpertCall | None = None
        """Called instead of the experts if other ranks hold some of them: tokens travel there
        and back."""
        self.shared_experts = None
        self.shared_gate = None
        if config.experts.shared_ffn_size:
            self.shared_experts = FeedForward(config, config.experts.shared_ffn_size)
        if config.experts.shared_gate:
            self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def fuse(self) -> None:
        """Compute gate and up of the shared expert in one product; for inference."""
        if self.shared_experts is not None:
            self.shared_experts.fuse()

    def forward(self, x: Tensor) -> Tensor:
        """[B,T,D] of x [B,T,D]."""
        return self._routed(x)[0]

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The result [B,T,D], and the experts of every token [B,T,k]."""
        out, chosen, _ = self._routed(x)
        return out, chosen

    def route(
        self, x: Tensor, counted: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """The result [B,T,D], and what the router did with the tokens that count: `counted` is 1
        for them, fp32 [B,T]. `given` [B,T,k]: see `Router.choose`."""
        out, _, (logits, scores, taken) = self._routed(x, given)
        return out, summarize(logits, scores, taken, counted)

    def _routed(
        self, x: Tensor, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The result, the experts of every token, and logits, scores and choices [B,T,E] of the
        router."""
        # Only the weights of chosen experts carry a gradient to the router; the choice itself has
        # none.
        logits = self.gate(x)
        scores = self.gate.scores(logits)
        chosen, weights = self.gate.choose(scores, given)

        # [B,T,E]: 1 where a token chose an expert. Its sums are the sizes of the groups, on the
        # device.
        taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0).detach()
        plan = dispatch(chosen.flatten(0, -2), taken.flatten(0, -2).sum(0))
        # With expert parallelism tokens travel to the ranks that hold their experts, and back.
        run = self.experts if self.exchange is None else self.exchange
        out = run(x.flatten(0, -2), weights.flatten(0, -2), plan).view(x.shape)
        if self.shared_experts is not None:
            shared = self.shared_experts(x)
            if self.shared_gate is not None:
                shared = shared * torch.sigmoid(self.shared_gate(x))
            out = out + shared

        return out, chosen, (logits, scores, taken)

    def balance(self, load: Tensor, keep: Tensor) -> None:
        """See `Router.balance`."""
        self.gate.balance(load, keep)

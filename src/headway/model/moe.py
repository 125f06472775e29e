"""A mixture of experts in place of a feed-forward: the normed stream comes in, the sum of a few experts' results per token goes out.

    x [B,T,D] -> router (fp32) -> scores [B,T,E] -> the k best experts and their weights [B,T,k]
      -> dispatch: tokens sorted by expert, fixed shape [N*k]     -> expert_products: gate, up, SwiGLU, down as grouped products
      -> each token adds up its k results                         (+ the shared expert, which every token passes)

No token is dropped, and no shape depends on the data: groups are offsets on the device. Sorting is stable and sums have a fixed order, so
that results are deterministic. A token's weight is applied before the last product: backward then needs no result of that product.

Shapes: B rows, T tokens, N = B*T, D width, E experts, k experts per token, F inner width of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.kernels.grouped import grouped_inputs, grouped_linear, grouped_weights
from headway.model.layers import FeedForward

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


class Dispatch(NamedTuple):
    """The order in which experts see tokens. A slot is one (token, choice) pair: slot n*k + j is the j-th expert of token n."""

    order: Tensor
    """[N*k]: the slot at each sorted place"""
    places: Tensor
    """[N*k]: the sorted place of each slot"""
    ends: Tensor
    """int32 [E]: where each expert's places end"""


class Router(nn.Module):
    """Logits of every expert, in fp32 for any dtype of the model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.weight = nn.Parameter(torch.empty(config.experts.num, config.hidden_size))
        biased = config.experts.bias_rate is not None
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.experts.num), requires_grad=False) if biased else None
        """Added to the scores by which experts are chosen; it has no gradient (see `balance`)."""

    def forward(self, x: Tensor) -> Tensor:
        """[...,E] of x [...,D]."""
        return F.linear(x.float(), self.weight.float())


class ExpertLinear(nn.Module):
    """The same matrix of all experts, stacked."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))


class Experts(nn.Module):
    """SwiGLU of every expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        num, width, inner = config.experts.num, config.hidden_size, config.expert_size
        self.gate_proj = ExpertLinear(num, width, inner)
        self.up_proj = ExpertLinear(num, width, inner)
        self.down_proj = ExpertLinear(num, inner, width)

    def forward(self, x: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        """[N,D]: the weighted sum of the experts of each token x [N,D], with weights fp32 [N,k]."""
        return expert_products(x, weights, plan, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class MixtureOfExperts(nn.Module):
    """The feed-forward of a layer with experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = FeedForward(config, config.experts.shared_ffn_size) if config.experts.shared_ffn_size else None

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
        scores = torch.softmax(logits, dim=-1) if self.config.router == "softmax" else torch.sigmoid(logits)
        chosen, weights = self.choose(scores)
        taken = torch.zeros_like(scores).scatter(-1, chosen, 1.0).detach()
        plan = dispatch(chosen.flatten(0, -2), taken.flatten(0, -2).sum(0))
        out = self.experts(x.flatten(0, -2), weights.flatten(0, -2), plan).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, None if counted is None else _summary(logits, scores, taken, counted)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(experts [...,k], weights [...,k]) of scores [...,E]; the first of equal experts comes first."""
        bias = self.gate.e_score_correction_bias
        chosen = torch.topk(scores.detach() if bias is None else scores.detach() + bias, self.config.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return chosen, weights

    @torch.no_grad()
    def balance(self, load: Tensor, keep: Tensor) -> None:
        """Move the bias of each expert against its load [E] of the whole step; `keep` is 0 for a step that changes nothing."""
        bias, rate = self.gate.e_score_correction_bias, self.config.bias_rate
        if bias is not None and rate:
            bias += keep * rate * torch.sign(load.mean() - load)


def _summary(logits: Tensor, scores: Tensor, taken: Tensor, counted: Tensor) -> Routing:
    weight = counted[..., None]
    shares = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    z = torch.logsumexp(logits, dim=-1).square()
    with torch.no_grad():
        entropy = torch.special.entr(shares).sum(-1)
    return Routing((taken * weight).sum(-2), (shares * weight).sum(-2), (z * counted).sum(-1), (entropy * counted).sum(-1))


def dispatch(chosen: Tensor, load: Tensor) -> Dispatch:
    """Sort the slots of chosen experts [N,k] by expert; `load` [E] says how many slots each expert has."""
    flat = chosen.flatten()
    order = torch.sort(flat.to(torch.int16), stable=True).indices
    places = torch.zeros_like(order).scatter(0, order, torch.arange(len(flat), device=flat.device))
    return Dispatch(order, places, load.cumsum(0).to(torch.int32))


def expert_products(x: Tensor, weights: Tensor, plan: Dispatch, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """[N,D]: for each token x [N,D] the sum over its experts of weight * down(silu(gate x) * up x)."""
    return ExpertProducts.apply(x, weights, plan.order, plan.places, plan.ends, gate, up, down)  # pyright: ignore[reportReturnType]


class ExpertProducts(torch.autograd.Function):
    """Keeps x, gate and up of backward's inputs; sorted copies of x and what follows from gate and up are made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, order: Tensor, places: Tensor, ends: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
    ) -> Tensor:
        k = weights.shape[1]
        inputs = x[order // k]
        gate, up = grouped_linear(inputs, w_gate, ends), grouped_linear(inputs, w_up, ends)
        inner = F.silu(gate.float()) * up.float() * weights.flatten()[order][:, None]
        result = grouped_linear(inner.to(x.dtype), w_down, ends)
        ctx.save_for_backward(x, weights, order, places, ends, w_gate, w_up, w_down, gate, up)
        return result[places].view(-1, k, x.shape[1]).float().sum(1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weights, order, places, ends, w_gate, w_up, w_down, gate, up = ctx.saved_tensors
        k, width = weights.shape[1], x.shape[1]
        needs = ctx.needs_input_grad
        weight, gate, up = weights.flatten()[order][:, None], gate.float(), up.float()
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        plain = silu * up
        by_result = grad[order // k]
        by_inner = grouped_inputs(by_result, w_down, ends).float()
        by_weights = (by_inner * plain).sum(1)[places].view(-1, k)
        by_plain = by_inner * weight
        by_gate = (by_plain * up * (sigmoid + silu * (1 - sigmoid))).to(x.dtype)
        by_up = (by_plain * silu).to(x.dtype)
        # Not forward's expression: the compiler would keep its result, k times as large as x, instead of making it again.
        inputs = x[(order // k).clamp(max=len(x) - 1)]
        by_inputs = grouped_inputs(by_gate, w_gate, ends) + grouped_inputs(by_up, w_up, ends)
        by_x = by_inputs[places].view(-1, k, width).float().sum(1).to(x.dtype)
        return (
            by_x, by_weights, None, None, None,
            grouped_weights(by_gate, inputs, ends, w_gate) if needs[5] else None,
            grouped_weights(by_up, inputs, ends, w_up) if needs[6] else None,
            grouped_weights(by_result, (plain * weight).to(x.dtype), ends, w_down) if needs[7] else None,
        )  # fmt: skip


def stack_routings(routings: list[Routing]) -> Routing:
    """What the routers of several layers did, in one tensor of each kind."""
    return Routing(*(torch.stack(values) for values in zip(*routings, strict=True)))


def counted_tokens(batch: Batch) -> Tensor:
    """fp32 [B,T]: 1 for tokens of documents, 0 for padding, which is the last document of a row where it has only zeros and no targets."""
    last = batch.document == batch.document[:, -1:]
    is_text = ((batch.tokens != 0) | (batch.loss_weight != 0)) & last
    return (~last | is_text.any(1, keepdim=True)).float()

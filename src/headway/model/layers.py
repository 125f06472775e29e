"""The layers a block is made of: normalisation, the projections of attention, the feed-forward.

The attention core is not here: a block calls it between `Attention.project` and `Attention.output`
(see transformer.py), so that it can be replaced.

Shapes: B rows, T tokens, D width, H query heads, KV key and value heads, hd head width.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.model.config import ModelConfig
    from headway.model.latent_attention import LatentAttention
    from headway.model.moe import MixtureOfExperts


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) * gain, in fp32.

    With offset 1 the weight is stored around 0, as in Gemma.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps = eps
        self.offset = offset
        self.gain = gain

    def forward(self, x: Tensor, total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`total` turns the mean square of the channels of this rank into that of all ranks."""
        # Written out: as fast as the fused operator forward, and several times faster backward on
        # CPU; compiled, both are one kernel.
        x32 = x.float()
        mean_square = x32.square().mean(-1, keepdim=True)
        if total is not None:
            mean_square = total(mean_square)
        scale = torch.rsqrt(mean_square + self.eps)
        if self.gain != 1.0:
            scale = scale * self.gain

        weight = self.weight
        if self.offset:
            # In fp32: a bf16 sum would round most of a weight near 0 away.
            weight = self.weight.float() + self.offset
        return (x32 * scale * weight).to(x.dtype)


class LayerNorm(nn.Module):
    """((x - mean) / std * weight + bias) * gain, in fp32."""

    def __init__(self, size: int, eps: float, *, bias: bool = True, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps = eps
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        if self.bias is not None:
            bias = self.bias.float()
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps)
        if self.gain != 1.0:
            normed = normed * self.gain
        return normed.to(x.dtype)


def build_norm(config: ModelConfig, *, gain: float = 1.0) -> RMSNorm | LayerNorm:
    """A normalisation of the residual stream; its result is multiplied by `gain`."""
    if config.norm.startswith("layernorm"):
        return LayerNorm(
            config.hidden_size, config.norm_eps, bias=config.norm == "layernorm", gain=gain
        )
    return _rms_norm(config, config.hidden_size, gain=gain)


def _rms_norm(config: ModelConfig, size: int, *, gain: float = 1.0) -> RMSNorm:
    offset = 1.0 if config.norm == "rmsnorm1p" else 0.0
    return RMSNorm(size, config.norm_eps, offset=offset, gain=gain)


def dropout(x: Tensor, rate: float) -> Tensor:
    """What a block calls on one rank; ranks that share tokens drop the same elements as one rank
    would (`LayerSplit.drop`)."""
    return F.dropout(x, rate)


class Attention(nn.Module):
    """q, k, v and output projections of one layer, with the norm and rotation of q and k."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width = config.hidden_size
        head = config.head_size
        self.q_proj = nn.Linear(width, config.num_heads * head, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * head, bias=config.qkv_bias)

        # A norm covers each head (Qwen 3, Gemma 3) or all heads of a token together (OLMo 2).
        q_width = head
        k_width = head
        if config.qk_norm_over == "projection":
            q_width = config.num_heads * head
            k_width = config.kv_heads * head
        self.q_norm = _rms_norm(config, q_width) if config.qk_norm else None
        self.k_norm = _rms_norm(config, k_width) if config.qk_norm else None
        self.norms_projections = config.qk_norm_over == "projection"
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Where ranks share the heads: the mean over ranks, for norms of all heads together."""

        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        """[H]: a logit of each head beside the scores of its keys (`ScoreRule`)."""
        self.o_gate = None
        """What attention gives is multiplied by its sigmoid: one number per channel."""
        if config.attention_gate:
            self.o_gate = nn.Linear(width, config.num_heads * head, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=config.output_bias)
        self.head_size = head

        # Decided when the layer is made, so that a compiled graph has no branch for it.
        self.rotates = config.positions == "rotary" and layer not in config.no_rope_layers
        self.interleaved = config.rope_interleaved
        self.angles: int | None = None
        """Which of two rotary frequencies are this layer's: 0 global, 1 local; None: the model
        has one."""
        if config.rope_local_theta is not None:
            self.angles = int(config.window_of(layer) is not None)

        self.grows_queries = False
        """Queries have angles of their own, longer with their position."""
        if config.rope_scaling is not None and config.rope_scaling.query_growth:
            self.grows_queries = True

        # Kernels divide scores by sqrt(hd). Another scale is reached by longer queries.
        self.query_scale = 1.0
        if config.attention_scale is not None:
            self.query_scale = config.attention_scale * head**0.5

        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of all three projections in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute q, k and v in one product; for inference."""
        if self.joined is None:
            self.joined = join_linears([self.q_proj, self.k_proj, self.v_proj])

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,hd], k and v [B,T,KV,hd] of x [B,T,D].

        Head counts follow the weights, which are a slice of the whole on a tensor-parallel rank.
        """
        heads = (*x.shape[:-1], -1, self.head_size)

        if self.joined is not None:
            sizes = [self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features]
            q, k, v = (
                part.unflatten(-1, heads[-2:])
                for part in F.linear(x, *self.joined).split(sizes, dim=-1)
            )
        else:
            q = self.q_proj(x).view(heads)
            k = self.k_proj(x).view(heads)
            v = self.v_proj(x).view(heads)

        if self.q_norm is not None and self.k_norm is not None:
            q = self._normed(q, self.q_norm)
            k = self._normed(k, self.k_norm)

        if self.rotates:
            if self.angles is not None:
                cos = cos[self.angles]
                sin = sin[self.angles]
            query_cos = cos
            query_sin = sin
            if self.grows_queries:
                cos, query_cos = cos
                sin, query_sin = sin
            turn = partial(rotate, interleaved=self.interleaved)
            return (
                turn(q, query_cos, query_sin, scale=self.query_scale),
                turn(k, cos, sin),
                v,
            )
        if self.query_scale != 1.0:
            q = (q.float() * self.query_scale).to(q.dtype)
        return q, k, v

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Queries or keys x [B,T,heads,hd], normed by head or over all heads of a token."""
        if not self.norms_projections:
            return norm(x)
        return norm(x.flatten(-2), self.mean_over_ranks).view(x.shape)

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,hd]."""
        return self.o_proj(o.flatten(-2))

    def gated(self, o: Tensor, x: Tensor) -> Tensor:
        """o [B,T,H,hd] times the gates of x [B,T,D], the normed stream that `project` read too."""
        assert self.o_gate is not None, "only some models have gates"
        return o * torch.sigmoid(self.o_gate(x)).view(o.shape)


def build_attention(config: ModelConfig, layer: int) -> Attention | LatentAttention:
    """The projections of one layer's softmax attention."""
    # Imported here: that module uses the norms of this one.
    if config.latent_attention is not None:
        from headway.model.latent_attention import LatentAttention

        return LatentAttention(config, layer)
    return Attention(config, layer)


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        if size is None:
            size = config.ffn_size
        self.gate_proj = None
        if config.ffn_gate:
            self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.ffn_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.ffn_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.ffn_bias)
        self.activate = ACTIVATIONS[config.activation]
        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of gate and up in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute gate and up in one product; for inference."""
        if self.joined is None and self.gate_proj is not None:
            self.joined = join_linears([self.gate_proj, self.up_proj])

    def forward(self, x: Tensor) -> Tensor:
        # Gate and up have one width, so their rows are the two halves of the joined matrix.
        if self.joined is not None:
            gate, up = F.linear(x, *self.joined).chunk(2, dim=-1)
            return self.down_proj(self.activate(gate) * up)
        if self.gate_proj is None:
            return self.down_proj(self.activate(self.up_proj(x)))
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def build_mlp(config: ModelConfig, layer: int) -> FeedForward | MixtureOfExperts:
    """The feed-forward of one layer."""
    # Imported here: a mixture has a FeedForward as its shared expert.
    if config.is_mixture(layer):
        from headway.model.moe import MixtureOfExperts

        return MixtureOfExperts(config)
    return FeedForward(config)


def join_linears(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Weights and biases of several linears, joined in one tensor each; None if one of the linears
    has an adapter.

    The linears become views of the joined tensors: memory is not doubled, and their names still
    give the weights.
    """
    # Not isinstance: an adapted linear is a subclass, and its product is not that of its weight.
    if any(type(linear) is not nn.Linear for linear in linears):
        return None

    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])

    begin = 0
    for linear in linears:
        end = begin + linear.out_features
        linear.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return weight, bias

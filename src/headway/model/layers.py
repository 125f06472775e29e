"""The layers a block is made of: normalisation, the projections of attention, the feed-forward. The attention core is not here: a block
calls it between `Attention.project` and `Attention.output` (see transformer.py), so that it can be replaced.

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
    """x / rms(x) * (offset + weight) * gain."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset, self.gain = eps, offset, gain

    def forward(self, x: Tensor, total: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """`total` turns the mean square of the channels of this rank into that of all."""
        # Written out: as fast as the fused operator forward, and several times faster backward on CPU; compiled, both are one kernel.
        x32 = x.float()
        square = x32.square().mean(-1, keepdim=True)
        scale = torch.rsqrt((square if total is None else total(square)) + self.eps)
        scale = scale if self.gain == 1.0 else scale * self.gain
        weight = self.weight if not self.offset else self.weight.float() + self.offset
        return (x32 * scale * weight).to(x.dtype)


class LayerNorm(nn.Module):
    """((x - mean) / std * weight + bias) * gain."""

    def __init__(self, size: int, eps: float, *, bias: bool = True, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None
        self.eps, self.gain = eps, gain

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps)
        return (normed if self.gain == 1.0 else normed * self.gain).to(x.dtype)


def build_norm(config: ModelConfig, *, gain: float = 1.0) -> RMSNorm | LayerNorm:
    """A normalisation of the residual stream; its result is multiplied by `gain`."""
    if config.norm.startswith("layernorm"):
        return LayerNorm(
            config.hidden_size, config.norm_eps, bias=config.norm == "layernorm", gain=gain
        )
    return _rms_norm(config, config.hidden_size, gain=gain)


def _rms_norm(config: ModelConfig, size: int, *, gain: float = 1.0) -> RMSNorm:
    return RMSNorm(
        size, config.norm_eps, offset=1.0 if config.norm == "rmsnorm1p" else 0.0, gain=gain
    )


def dropout(x: Tensor, rate: float) -> Tensor:
    """Elements set to zero at random, the others scaled up."""
    return F.dropout(x, rate)


class Attention(nn.Module):
    """q, k, v and output projections of one layer, with the norm and rotation of q and k."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_size
        self.q_proj = nn.Linear(width, config.num_heads * head, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        widths = (
            (head, head)
            if config.qk_norm_over == "head"
            else (config.num_heads * head, config.kv_heads * head)
        )
        self.q_norm, self.k_norm = (
            _rms_norm(config, width) if config.qk_norm else None for width in widths
        )
        self.norms_projections = config.qk_norm_over == "projection"
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Where ranks share the heads: the mean over them, for norms of all heads together."""
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.attention_sinks else None
        """[H]: a logit of each head beside the scores of its keys (`ScoreRule`)."""
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=config.output_bias)
        self.head_size = head
        self.rotates = config.positions == "rotary" and layer not in config.no_rope_layers
        self.interleaved = config.rope_interleaved
        self.angles = (
            None if config.rope_local_theta is None else int(config.window_of(layer) is not None)
        )
        """Which of several rotary frequencies are this layer's."""
        # Kernels divide scores by sqrt(hd): with another scale the queries are longer.
        self.query_scale = (
            1.0 if config.attention_scale is None else config.attention_scale * head**0.5
        )
        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of all three projections in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute q, k and v in one product; for inference."""
        if self.joined is None:
            self.joined = join_linears([self.q_proj, self.k_proj, self.v_proj])

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,hd], k and v [B,T,KV,hd] of x [B,T,D]; head counts follow the weights, which may be a slice of the whole."""
        heads = (*x.shape[:-1], -1, self.head_size)
        if self.joined is not None:
            sizes = [self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features]
            q, k, v = (
                part.unflatten(-1, heads[-2:])
                for part in F.linear(x, *self.joined).split(sizes, dim=-1)
            )
        else:
            q, k, v = (
                self.q_proj(x).view(heads),
                self.k_proj(x).view(heads),
                self.v_proj(x).view(heads),
            )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if self.rotates:
            cos, sin = (cos, sin) if self.angles is None else (cos[self.angles], sin[self.angles])
            turn = partial(rotate, cos=cos, sin=sin, interleaved=self.interleaved)
            return turn(q, scale=self.query_scale), turn(k), v
        return (q if self.query_scale == 1.0 else (q.float() * self.query_scale).to(q.dtype)), k, v

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        if not self.norms_projections:
            return norm(x)
        return norm(x.flatten(-2), self.mean_over_ranks).view(x.shape)

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,hd]."""
        return self.o_proj(o.flatten(-2))


def build_attention(config: ModelConfig, layer: int) -> Attention | LatentAttention:
    """The projections of one layer's attention."""
    if config.latent_attention is not None:
        from headway.model.latent_attention import LatentAttention

        return LatentAttention(config, layer)
    return Attention(config, layer)


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        size = config.ffn_size if size is None else size
        self.gate_proj = (
            nn.Linear(config.hidden_size, size, bias=config.ffn_bias) if config.ffn_gate else None
        )
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
    if config.is_mixture(layer):
        from headway.model.moe import MixtureOfExperts

        return MixtureOfExperts(config)
    return FeedForward(config)


def join_linears(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
    """Weights and biases of several linears in one tensor each; the linears become views of them. None where one has an adapter."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = (
        torch.cat([linear.bias.detach() for linear in linears])
        if linears[0].bias is not None
        else None
    )
    begin = 0
    for linear in linears:
        end = begin + linear.out_features
        linear.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return weight, bias

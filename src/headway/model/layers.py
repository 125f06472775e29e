"""The layers a block is made of: normalisation, the projections of attention, the feed-forward. The attention core is not here: a block
calls it between `Attention.project` and `Attention.output` (see transformer.py), so that it can be replaced.

Shapes: B rows, T tokens, D width, H query heads, KV key and value heads, hd head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.rope import rotate

if TYPE_CHECKING:
    from headway.model.config import ModelConfig
    from headway.model.moe import MixtureOfExperts


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Written out: as fast as the fused operator forward, and several times faster backward on CPU; compiled, both are one kernel.
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


def build_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The normalisation of the residual stream."""
    return (RMSNorm if config.norm == "rmsnorm" else LayerNorm)(config.hidden_size, config.norm_eps)


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
        self.q_norm = RMSNorm(head, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head, config.norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=config.output_bias)
        self.head_size = head
        self.rotates = layer not in config.no_rope_layers
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
            q, k, v = (part.unflatten(-1, heads[-2:]) for part in F.linear(x, *self.joined).split(sizes, dim=-1))
        else:
            q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,hd]."""
        return self.o_proj(o.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU with separate gate and up projections."""

    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        super().__init__()
        size = config.ffn_size if size is None else size
        self.gate_proj = nn.Linear(config.hidden_size, size, bias=config.ffn_bias)
        self.up_proj = nn.Linear(config.hidden_size, size, bias=config.ffn_bias)
        self.down_proj = nn.Linear(size, config.hidden_size, bias=config.ffn_bias)
        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of gate and up in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute gate and up in one product; for inference."""
        if self.joined is None:
            self.joined = join_linears([self.gate_proj, self.up_proj])

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is not None:
            gate, up = F.linear(x, *self.joined).chunk(2, dim=-1)
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


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
    bias = torch.cat([linear.bias.detach() for linear in linears]) if linears[0].bias is not None else None
    begin = 0
    for linear in linears:
        end = begin + linear.out_features
        linear.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return weight, bias

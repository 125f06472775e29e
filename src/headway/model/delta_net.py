"""Gated DeltaNet (Yang 2024, arXiv:2412.06464): a layer of linear attention, as Qwen 3 Next and
Qwen 3.5 have it. It has a state of fixed size instead of keys and values of all tokens.

    x [B,T,D] -> q, k, v projections -> mixed [B,T,M]   M = 2 G K + H V
              -> a, b projections    -> decay g and rate b [B,T,H]
              -> z projection        -> gates z [B,T,H,V]

    mixed -> short convolution, silu -> q, k [G,K], v [H,V] of each token     short_convolution.py
          -> gated delta rule        -> o [B,T,H,V]                           delta_rule.py
          -> w norm(o) silu(z)       -> out_proj -> [B,T,D]

    g = -exp(A_log) softplus(a + dt_bias)      b = sigmoid(b)

The two middle lines are the layer's core (state_mixer.py).

Shapes: B rows, T tokens, D width, G key heads, H value heads, K and V their widths, S segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.kernels.delta_rule import delta_rule, delta_step
from headway.kernels.short_convolution import convolution_step, last_inputs, short_convolution
from headway.model.state_mixer import MixerState, ShortConvolution, StateMixer

if TYPE_CHECKING:
    from headway.kernels.segments import Segments
    from headway.model.config import ModelConfig


class GatedNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) * silu(z), over each head, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """In the dtype of z; both are [...,V]."""
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float() * F.silu(z.float())).to(z.dtype)


class GatedDeltaNet(StateMixer):
    """The parameters of one layer, and its three parts: `project`, `mix`, `output`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        linear = config.linear_attention
        assert linear is not None
        width = config.hidden_size
        self.key_head_dim = linear.key_head_dim
        self.value_head_dim = linear.value_head_dim
        self.q_proj = nn.Linear(width, linear.key_width, bias=False)
        self.k_proj = nn.Linear(width, linear.key_width, bias=False)
        self.v_proj = nn.Linear(width, linear.value_width, bias=False)
        self.z_proj = nn.Linear(width, linear.value_width, bias=False)
        self.b_proj = nn.Linear(width, linear.value_heads, bias=False)
        self.a_proj = nn.Linear(width, linear.value_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(linear.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(linear.value_heads))
        self.q_conv = ShortConvolution(linear.key_width, linear.taps)
        self.k_conv = ShortConvolution(linear.key_width, linear.taps)
        self.v_conv = ShortConvolution(linear.value_width, linear.taps)
        self.norm = GatedNorm(linear.value_head_dim, config.norm_eps)
        self.out_proj = nn.Linear(linear.value_width, width, bias=False)

    def projections(self) -> list[nn.Linear]:
        """Those of the stream."""
        return [self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.b_proj, self.a_proj]

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """mixed [B,T,M], g and b fp32 [B,T,2,H] and z [B,T,H,V] of x [B,T,D]; positions (cos and sin)
        do not matter here.

        Head counts follow the weights, which are a slice of the whole on a tensor-parallel rank.
        """
        q, k, v, z, b, a = self.projected(x)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        controls = torch.stack((g, b.float().sigmoid()), dim=-2)
        return torch.cat((q, k, v), dim=-1), controls, z.unflatten(-1, (-1, self.value_head_dim))

    def mix_segments(
        self,
        mixed: Tensor,
        controls: Tensor,
        z: Tensor,
        segments: Segments,
        past: MixerState | None,
    ) -> tuple[Tensor, MixerState | None]:
        """o [N,H,V] of the tokens [N,...] of all segments, and what follows `past` behind each of
        them."""
        inputs = None
        memory = None
        if past is not None:
            inputs, memory = past
        convolved = short_convolution(mixed, self._taps(), segments, inputs)
        q, k, v = self._heads(F.silu(convolved))
        g, b = controls.unbind(-2)
        o, memory = delta_rule(q, k, v, g, b, segments, memory)
        state = None
        if inputs is not None:
            state = MixerState(last_inputs(mixed, segments, inputs), memory)
        return self.norm(o, z), state

    def mix_step(
        self, mixed: Tensor, controls: Tensor, z: Tensor, past: MixerState
    ) -> tuple[Tensor, MixerState]:
        """o [B,H,V] of one token of each row, mixed [B,M], and what follows `past` behind it."""
        convolved, inputs = convolution_step(mixed, self._taps(), past.inputs)
        q, k, v = self._heads(F.silu(convolved))
        g, b = controls.unbind(-2)
        o, memory = delta_step(q, k, v, g, b, past.memory)
        return self.norm(o, z), MixerState(inputs, memory)

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,V]."""
        return self.out_proj(o.flatten(-2))

    def _taps(self) -> Tensor:
        """[M,1,taps] of queries, keys and values."""
        return torch.cat((self.q_conv.weight, self.k_conv.weight, self.v_conv.weight))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [N,G,K] and v [N,H,V] of mixed [N,M]."""
        keys = self.k_conv.weight.shape[0]
        values = self.v_conv.weight.shape[0]
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q = q.unflatten(-1, (-1, self.key_head_dim))
        k = k.unflatten(-1, (-1, self.key_head_dim))
        return q, k, v.unflatten(-1, (-1, self.value_head_dim))

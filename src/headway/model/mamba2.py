"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a state-space layer, as Granite 4 has it in most layers.
It has a state of fixed size instead of keys and values of all tokens.

    x [B,T,D] -> x, b, c projections -> mixed [B,T,M]   M = H P + 2 G N
              -> dt projection       -> decay g and step dt [B,T,H]
              -> z projection        -> gates z [B,T,H,P]

    mixed -> short convolution, silu -> x [H,P], b and c [G,N] of each token    short_convolution.py
          -> state space             -> y = S^T c + D x                        state_space.py
          -> y silu(z)

    w norm(y silu(z)) -> out_proj -> [B,T,D]        the norm is over all heads

    dt = softplus(dt + dt_bias)      g = -exp(A_log) dt      S' = e^g S + b (dt x)^T

The lines in the middle are the layer's core (state_mixer.py).

Shapes: B rows, T tokens, D width, H heads of P channels, G groups of heads that share b and c, N channels
of these, S segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.kernels.short_convolution import convolution_step, last_inputs, short_convolution
from headway.kernels.state_space import state_space, state_space_step
from headway.model.layers import RMSNorm
from headway.model.state_mixer import MixerState, ShortConvolution, StateMixer

if TYPE_CHECKING:
    from headway.kernels.segments import Segments
    from headway.model.config import ModelConfig


class Mamba2(StateMixer):
    """The parameters of one layer, and its three parts: `project`, `mix`, `output`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        space = config.state_space
        assert space is not None
        width = config.hidden_size
        self.head_dim = space.head_dim
        self.state_size = space.state_size
        self.z_proj = nn.Linear(width, space.width, bias=space.bias)
        self.x_proj = nn.Linear(width, space.width, bias=space.bias)
        self.b_proj = nn.Linear(width, space.group_width, bias=space.bias)
        self.c_proj = nn.Linear(width, space.group_width, bias=space.bias)
        self.dt_proj = nn.Linear(width, space.heads, bias=space.bias)
        self.A_log = nn.Parameter(torch.zeros(space.heads))
        self.dt_bias = nn.Parameter(torch.ones(space.heads))
        self.D = nn.Parameter(torch.ones(space.heads))
        bias = space.conv_bias
        self.x_conv = ShortConvolution(space.width, space.taps, bias=bias)
        self.b_conv = ShortConvolution(space.group_width, space.taps, bias=bias)
        self.c_conv = ShortConvolution(space.group_width, space.taps, bias=bias)
        self.norm = RMSNorm(space.width, config.norm_eps)
        self.out_proj = nn.Linear(space.width, width, bias=space.bias)

    def projections(self) -> list[nn.Linear]:
        """Those of the stream."""
        return [self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj]

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """mixed [B,T,M], g and dt fp32 [B,T,2,H] and z [B,T,H,P] of x [B,T,D]; positions (cos and sin)
        do not matter here.

        Head counts follow the weights, which are a slice of the whole on a tensor-parallel rank.
        """
        z, inputs, b, c, dt = self.projected(x)
        dt = F.softplus(dt.float() + self.dt_bias.float())
        g = -self.A_log.float().exp() * dt
        mixed = torch.cat((inputs, b, c), dim=-1)
        return mixed, torch.stack((g, dt), dim=-2), z.unflatten(-1, (-1, self.head_dim))

    def mix_segments(
        self,
        mixed: Tensor,
        controls: Tensor,
        z: Tensor,
        segments: Segments,
        past: MixerState | None,
    ) -> tuple[Tensor, MixerState | None]:
        """y silu(z) [N,H,P] of the tokens [N,...] of all segments, and what follows `past` behind each
        of them."""
        inputs = None
        memory = None
        if past is not None:
            inputs, memory = past
        convolved = short_convolution(mixed, self._taps(), segments, inputs)
        x, b, c = self._parts(convolved)
        g, dt = controls.unbind(-2)
        y, memory = state_space(c, b, x * dt[..., None], g, segments, memory)
        state = None
        if inputs is not None:
            state = MixerState(last_inputs(mixed, segments, inputs), memory)
        return self._gated(y, x, z), state

    def mix_step(
        self, mixed: Tensor, controls: Tensor, z: Tensor, past: MixerState
    ) -> tuple[Tensor, MixerState]:
        """y silu(z) [B,H,P] of one token of each row, mixed [B,M], and what follows `past` behind it."""
        convolved, inputs = convolution_step(mixed, self._taps(), past.inputs)
        x, b, c = self._parts(convolved)
        g, dt = controls.unbind(-2)
        y, memory = state_space_step(c, b, x * dt[..., None], g, past.memory)
        return self._gated(y, x, z), MixerState(inputs, memory)

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of y silu(z) [B,T,H,P]."""
        return self.out_proj(self.norm(o.flatten(-2), self.mean_over_ranks))

    def _taps(self) -> Tensor:
        """[M,1,taps] of x, b and c."""
        return torch.cat((self.x_conv.weight, self.b_conv.weight, self.c_conv.weight))

    def _parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N,H,P], b and c [N,G,N] of what the taps give, fp32 [N,M]."""
        if self.x_conv.bias is not None:
            assert self.b_conv.bias is not None
            assert self.c_conv.bias is not None
            bias = torch.cat((self.x_conv.bias, self.b_conv.bias, self.c_conv.bias))
            convolved = convolved + bias.float()
        width = self.x_conv.weight.shape[0]
        groups = self.b_conv.weight.shape[0]
        x, b, c = F.silu(convolved).split([width, groups, groups], dim=-1)
        x = x.unflatten(-1, (-1, self.head_dim))
        b = b.unflatten(-1, (-1, self.state_size))
        return x, b, c.unflatten(-1, (-1, self.state_size))

    def _gated(self, y: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """(y + D x) silu(z) in the dtype of z; all are [...,H,P]."""
        skipped = x * self.D.float()[..., None]
        return ((y + skipped) * F.silu(z.float())).to(z.dtype)

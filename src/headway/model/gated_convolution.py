"""A gated short convolution, as LFM2 has it in most layers (Liquid AI 2025, arXiv:2511.23404): a
token sees itself and a few before it.

    x [B,T,D] -> b, c, x projections -> gates b and c, inputs x [B,T,M]

    b x -> short convolution over each channel -> y [B,T,M]     kernels/short_convolution.py
    c y -> out_proj -> [B,T,D]

The middle line is the layer's core. Its state is the last inputs of the convolution.

Shapes: B rows, T tokens, D width, M channels, S segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from headway.kernels.short_convolution import convolution_step, last_inputs, short_convolution
from headway.model.state_mixer import MixerState, ShortConvolution, StateMixer

if TYPE_CHECKING:
    from headway.kernels.segments import Segments
    from headway.model.config import ModelConfig


class GatedConvolution(StateMixer):
    """The parameters of one layer, and its three parts: `project`, `mix`, `output`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        short = config.short_convolution
        assert short is not None
        width = config.hidden_size
        channels = config.convolved
        self.b_proj = nn.Linear(width, channels, bias=short.bias)
        self.c_proj = nn.Linear(width, channels, bias=short.bias)
        self.x_proj = nn.Linear(width, channels, bias=short.bias)
        self.conv = ShortConvolution(channels, short.taps, bias=short.bias)
        self.out_proj = nn.Linear(channels, width, bias=short.bias)

    def projections(self) -> list[nn.Linear]:
        """Those of the stream."""
        return [self.b_proj, self.c_proj, self.x_proj]

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gates b and c and inputs x, [B,T,M] each."""
        b, c, inputs = self.projected(x)
        return b, c, inputs

    def mix_segments(
        self,
        mixed: Tensor,
        controls: Tensor,
        z: Tensor,
        segments: Segments,
        past: MixerState | None,
    ) -> tuple[Tensor, MixerState | None]:
        """c y [N,M] of b (`mixed`), c (`controls`) and x (`z`), and what follows `past`."""
        inputs = mixed * z
        if past is None:
            y = short_convolution(inputs, self.conv.weight, segments)
            return self._gated(y, controls), None
        y = short_convolution(inputs, self.conv.weight, segments, past.inputs)
        last = last_inputs(inputs, segments, past.inputs)
        return self._gated(y, controls), MixerState(last, past.memory)

    def mix_step(
        self, mixed: Tensor, controls: Tensor, z: Tensor, past: MixerState
    ) -> tuple[Tensor, MixerState]:
        """The same of one token of each row, [B,M]."""
        y, last = convolution_step(mixed * z, self.conv.weight, past.inputs)
        return self._gated(y, controls), MixerState(last, past.memory)

    def _gated(self, y: Tensor, c: Tensor) -> Tensor:
        """c y [N,M] in the dtype of c, with the bias of the convolution y, which is fp32."""
        if self.conv.bias is not None:
            y = y + self.conv.bias.float()
        return (c.float() * y).to(c.dtype)

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of c y [B,T,M]."""
        return self.out_proj(o)

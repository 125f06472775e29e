"""What layers have in common that keep a state of fixed size instead of keys and values of all
tokens: linear attention (delta_net.py), state spaces (mamba2.py) and gated short convolutions
(gated_convolution.py).

    x [B,T,D] -> project -> three tensors [B,T,...] -> core -> o [B,T,...] -> output -> [B,T,D]

The parts before and after the core have no memory and trace as graphs (`Block.pre_attention`,
`post_attention`). The core begins anew at every document, so packed documents compute what they
compute alone. In a cache, the state behind a sequence's last token is all that the next one needs
(`MixerState`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.kernels.segments import Segments
from headway.model.layers import join_linears

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.kernels.attention import AttentionMask


class MixerState(NamedTuple):
    """What a layer keeps of some sequences (`StateShape`)."""

    inputs: Tensor
    """[S,taps - 1,M]: the last inputs of the convolution"""
    memory: Tensor
    """fp32 [S,H,K,V]: the state of the recurrence; without elements in a layer without one"""


class ShortConvolution(nn.Module):
    """The taps of each channel."""

    def __init__(self, channels: int, taps: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None


class StateMixer(nn.Module):
    """A layer with a state, and its three parts: `project`, `mix`, `output`."""

    def __init__(self) -> None:
        super().__init__()
        # A block reads and sets these on any attention; none of these kinds has sinks, and only one
        # has a norm over the heads of all ranks.
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.sinks: nn.Parameter | None = None
        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weights of all projections of the stream in one tensor, after `fuse`."""

    def projections(self) -> list[nn.Linear]:
        """Those of the stream."""
        raise NotImplementedError

    def fuse(self) -> None:
        """Compute all projections of the stream in one product; for inference."""
        if self.joined is None:
            self.joined = join_linears(self.projections())

    def projected(self, x: Tensor) -> list[Tensor]:
        """What each projection gives of x [B,T,D]."""
        if self.joined is None:
            return [projection(x) for projection in self.projections()]
        sizes = [projection.out_features for projection in self.projections()]
        return list(F.linear(x, *self.joined).split(sizes, dim=-1))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors [B,T,...] of x [B,T,D] that the core takes; positions (cos and sin) do
        not matter here.

        Sizes follow the weights, which are a slice of the whole on a tensor-parallel rank.
        """
        raise NotImplementedError

    def mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        *,
        window: int | None = None,
    ) -> Tensor:
        """o, of the shape of the third tensor: the core of the layer, in the place of attention's.

        q, k and v are the three that `project` gives. Windows of softmax layers are not for this
        one.
        """
        segments = Segments.of_mask(mask)
        o, _ = self.mix_segments(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), segments, None)
        return o.view(v.shape)

    def mix_segments(
        self,
        mixed: Tensor,
        controls: Tensor,
        z: Tensor,
        segments: Segments,
        past: MixerState | None,
    ) -> tuple[Tensor, MixerState | None]:
        """o [N,...] of the tokens [N,...] of all segments, and what follows `past` behind each of
        them."""
        raise NotImplementedError

    def mix_step(
        self, mixed: Tensor, controls: Tensor, z: Tensor, past: MixerState
    ) -> tuple[Tensor, MixerState]:
        """o [B,...] of one token of each row, and what follows `past` behind it."""
        raise NotImplementedError

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of what the core gives."""
        raise NotImplementedError

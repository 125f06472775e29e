"""A causal convolution of a few taps over each channel by itself, which begins anew at every segment.

    y[t, c] = sum over i < K of w[c, K - 1 - i] x[t - i, c]        x before the segment: 0, or what a
                                                                   cache holds of it

Products and sums are fp32, in the same order for every length, so a document gives the same bits in
a packed row and alone.

Shapes: N tokens of all segments, C channels, K taps, S segments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.segments import Segments


def short_convolution(
    x: Tensor, weight: Tensor, segments: Segments, past: Tensor | None = None
) -> Tensor:
    """fp32 [N,C] of x [N,C] and weight [C,1,K].

    `past` [S,K-1,C]: the inputs before each segment; None: it begins its document.
    """
    taps = weight.float()[:, 0]
    most = taps.shape[-1] - 1
    x32 = x.float()
    offset = segments.offset[:, None]

    result = x32 * taps[:, most]
    for back in range(1, most + 1):
        # Shifted over all segments, then cleared where the shift crossed the bound of one.
        shifted = F.pad(x32, (0, 0, back, 0))[: len(x32)]
        inside = offset >= back
        before = x32.new_zeros(())
        if past is not None:
            before = _before(past, segments, back)
        result = result + torch.where(inside, shifted, before) * taps[:, most - back]
    return result


def _before(past: Tensor, segments: Segments, back: int) -> Tensor:
    """fp32 [N,C]: the input `back` tokens before each of the first tokens of a segment; anything at
    the others."""
    most = past.shape[1]
    lengths = torch.tensor(segments.lengths, device=past.device)
    number = torch.repeat_interleave(torch.arange(len(past), device=past.device), lengths)
    index = (most - back + segments.offset).clamp(max=most - 1)
    return past[number, index].float()


def last_inputs(x: Tensor, segments: Segments, past: Tensor) -> Tensor:
    """[S,K-1,C]: the last inputs of each segment, from x [N,C] and what came before it, `past`
    [S,K-1,C]."""
    most = past.shape[1]
    rows: list[Tensor] = []
    for number, (start, length) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
        new = x[start + max(0, length - most) : start + length]
        rows.append(torch.cat((past[number, len(new) :], new.to(past.dtype))))
    return torch.stack(rows)


def convolution_step(x: Tensor, weight: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: (fp32 [B,C], the inputs that the next one needs [B,K-1,C]) of x [B,C]
    and `past` [B,K-1,C]."""
    taps = weight.float()[:, 0]
    most = taps.shape[-1] - 1
    result = x.float() * taps[:, most]
    for back in range(1, most + 1):
        result = result + past[:, most - back].float() * taps[:, most - back]
    return result, torch.cat((past[:, 1:], x[:, None].to(past.dtype)), dim=1)

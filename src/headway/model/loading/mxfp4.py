"""Weights in mxfp4, as gpt_oss publishes its experts: blocks and scales of a tensor come in, bf16
comes out.

    blocks   uint8 [..., outputs, inputs / 32, 16]   two inputs in each byte, the first one in the low
                                                     half: a sign and three bits of magnitude
    scales   uint8 [..., outputs, inputs / 32]       one exponent of two for each 32 inputs, plus 127

Every product of a value and a scale is exact in bf16 but for the smallest: these round to the
nearest.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What three bits stand for: e2m1, two bits of exponent and one of mantissa."""
BLOCK = 32
"""Inputs that share a scale."""
BYTES = 16
"""Bytes that they take."""
OFFSET = 127
"""Of the exponent in a scale (e8m0)."""


def shape_of(blocks: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the tensor that blocks and scales hold; None if they do not fit each other."""
    if len(blocks) < 3 or blocks[-1] != BYTES or blocks[:-1] != scales:
        return None
    return (*blocks[:-2], blocks[-2] * BLOCK)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 [..., outputs, inputs]."""
    import torch

    pairs, powers = _tables()
    values = pairs[blocks.int()].flatten(-2) * powers[scales.int()][..., None]
    return values.flatten(-2).to(torch.bfloat16)


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """fp32: the two values of each byte, [256, 2], and the power of each scale, [256]."""
    import torch

    values = (*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))
    pairs = torch.tensor(
        [(values[byte & 15], values[byte >> 4]) for byte in range(256)], dtype=torch.float32
    )
    # In fp64 first: the largest exponent is beyond fp32 and becomes infinity there.
    powers = torch.tensor([2.0 ** (scale - OFFSET) for scale in range(256)], dtype=torch.float64)
    return pairs, powers.float()

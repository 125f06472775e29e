"""Rotary positions: positions come in, cos and sin go out once per forward; each layer that rotates turns its q and k by them.

The two halves of a head are the two coordinates of its planes (Hugging Face's layout): plane i is (x[i], x[i + hd/2]).
"""

import math

import torch

from headway.model.config import ModelConfig, RopeScaling


class Rotation:
    """The angles of one model. Not a module: the frequencies stay fp32 and exact whatever is done to the model's dtype or device."""

    def __init__(self, config: ModelConfig) -> None:
        self.frequencies = inverse_frequencies(config)
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __call__(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [B, T, hd/2], of int positions [B, T]."""
        frequencies = self._on_device.get(position.device)
        if frequencies is None:
            frequencies = self._on_device[position.device] = self.frequencies.to(position.device)
        angle = position[..., None].float() * frequencies
        return angle.cos(), angle.sin()


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """fp32 [hd/2] on the CPU: angle per position of each plane."""
    size = config.head_size
    # fp32 from the start, as every checkpoint in use was trained: a more exact power would turn far positions by another angle.
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, stretched)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head of x [B, T, heads, hd] by the angles of its position."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

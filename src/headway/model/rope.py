"""Rotary positions: positions come in, cos and sin go out once per forward; each layer that rotates turns its q and k by them.

The two halves of a head are the two coordinates of its planes (Hugging Face's layout): plane i is (x[i], x[i + hd/2]).
"""

import math

import torch
from torch import Tensor

from headway.model.config import ModelConfig, RopeScaling, yarn_growth


class Rotation:
    """The angles of one model. Not a module: the frequencies stay fp32 and exact when the model's dtype or device changes."""

    def __init__(self, config: ModelConfig) -> None:
        self.frequencies = inverse_frequencies(config)
        self.scale = attention_factor(config.rope_scaling)
        self._on_device: dict[torch.device, Tensor] = {}

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [B, T, hd/2], of int positions [B, T]."""
        frequencies = self._on_device.get(position.device)
        if frequencies is None:
            frequencies = self._on_device[position.device] = self.frequencies.to(position.device)
        angle = position[..., None].float() * frequencies
        return angle.cos() * self.scale, angle.sin() * self.scale


def inverse_frequencies(config: ModelConfig) -> Tensor:
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
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta)
    return _llama3(frequencies, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: yarn makes queries and keys longer, and so the attention sharper."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    return scaling.attention_factor if scaling.attention_factor is not None else yarn_growth(scaling.factor)


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Fast planes stay, slow ones are divided by factor, and a straight ramp over the planes joins them."""
    planes = len(frequencies)

    def plane_of(turns: float) -> float:
        """The plane, as a real number, that turns this often over the original length."""
        return planes * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first, last = plane_of(scaling.beta_fast), plane_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * planes - 1)
    last += 0.001 if first == last else 0  # no division by zero
    slow = ((torch.arange(planes, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, stretched)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [B, T, heads, hd] by the angles of its position."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

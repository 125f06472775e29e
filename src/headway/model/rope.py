"""Rotary positions: positions come in, cos and sin go out once per forward; each layer that rotates turns its q and k by them.

The two halves of what is rotated are the two coordinates of its planes (Hugging Face's layout): plane i is (x[i], x[i + R/2]). With
`rope_interleaved` plane i is (x[2i], x[2i + 1]). R channels of a head are rotated, all of them unless `rotary_fraction` says otherwise.

longrope has two lists of frequencies; a document uses the long ones if it is longer than `original_max_seq_len`. Through a KV cache, where
keys are stored rotated, the cache's capacity decides instead.
"""

import math

import torch
from torch import Tensor

from headway.model.config import ModelConfig
from headway.model.rope_config import RopeScaling, yarn_growth


class Rotation:
    """The angles of one model. Not a module: the frequencies stay fp32 and exact when the model's dtype or device changes."""

    def __init__(self, config: ModelConfig) -> None:
        scaling = config.rope_scaling
        plain = (
            config.with_(rope_theta=config.rope_local_theta, rope_scaling=None)
            if config.rope_local_theta is not None
            else None
        )
        self.frequencies = inverse_frequencies(config)
        self.long = (
            inverse_frequencies(config, long=True)
            if scaling is not None and scaling.kind == "longrope"
            else None
        )
        self.local = None if plain is None else inverse_frequencies(plain)
        self.original = 0 if scaling is None else scaling.original_max_seq_len
        self.scale = attention_factor(scaling)
        self._on_device: dict[tuple[str, torch.device], Tensor] = {}

    def __call__(self, position: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [B, T, R/2], of int positions [B, T]; with local frequencies [2, B, T, R/2], those second.

        `capacity`: of the KV cache that the rotated keys go into.
        """
        angle = position[..., None].float() * self._frequencies(position, capacity)
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        if self.local is None:
            return cos, sin
        near = position[..., None].float() * self._moved("local", self.local, position.device)
        return torch.stack((cos, near.cos())), torch.stack((sin, near.sin()))

    def _frequencies(self, position: Tensor, capacity: int | None) -> Tensor:
        """[R/2], or [B, T, R/2] where documents differ."""
        short = self._moved("short", self.frequencies, position.device)
        if (
            self.long is None
            or (position.shape[1] if capacity is None else capacity) <= self.original
        ):
            return short
        long = self._moved("long", self.long, position.device)
        if capacity is not None:
            return long
        return torch.where((document_lengths(position) > self.original)[..., None], long, short)

    def _moved(self, name: str, frequencies: Tensor, device: torch.device) -> Tensor:
        found = self._on_device.get((name, device))
        if found is None:
            found = self._on_device[name, device] = frequencies.to(device)
        return found


def document_lengths(position: Tensor) -> Tensor:
    """[B, T]: how long the document of each token is; a document begins where the position does not go up."""
    columns = torch.arange(position.shape[1], device=position.device)
    is_last = torch.nn.functional.pad(position[:, 1:] <= position[:, :-1], (0, 1), value=True)
    ends = torch.where(is_last, columns, position.shape[1]).flip(1).cummin(1).values.flip(1)
    return position.gather(1, ends) + 1


def inverse_frequencies(config: ModelConfig, *, long: bool = False) -> Tensor:
    """fp32 [R/2] on the CPU: angle per position of each plane; `long`: in long documents, with longrope."""
    size = config.rotary_size
    # fp32 from the start, as every checkpoint in use was trained: a more exact power would turn far positions by another angle.
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        factors = torch.tensor(
            scaling.long_factor if long else scaling.short_factor, dtype=torch.float32, device="cpu"
        )
        return 1.0 / (factors * config.rope_theta**exponent)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta)
    return _llama3(frequencies, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: yarn and longrope make queries and keys longer, and so the attention sharper."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn" and scaling.mscale and scaling.mscale_all_dim:
        return yarn_growth(scaling.factor, scaling.mscale) / yarn_growth(
            scaling.factor, scaling.mscale_all_dim
        )
    if scaling.kind == "yarn":
        return yarn_growth(scaling.factor)
    return (
        math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_seq_len))
        if scaling.factor > 1
        else 1.0
    )


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Fast planes stay, slow ones are divided by factor, and a straight ramp over the planes joins them."""
    planes = len(frequencies)

    def plane_of(turns: float) -> float:
        """The plane, as a real number, that turns this often over the original length."""
        return (
            planes
            * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi))
            / math.log(theta)
        )

    first, last = plane_of(scaling.beta_fast), plane_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * planes - 1)
    last += 0.001 if first == last else 0  # no division by zero
    slow = (
        (torch.arange(planes, dtype=torch.float32, device="cpu") - first) / (last - first)
    ).clamp(0, 1)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelength
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, stretched)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, scale: float = 1.0
) -> Tensor:
    """Turn each head of x [B, T, heads, hd] by the angles of its position, and multiply it by `scale`; cos and sin are [B, T, R/2]."""
    x32, size = x.float(), 2 * cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned, rest = x32[..., :size], x32[..., size:]
    first, second = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    )
    planes = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(planes, dim=-1).flatten(-2) if interleaved else torch.cat(planes, dim=-1)
    whole = turned if size == x.shape[-1] else torch.cat((turned, rest), dim=-1)
    return (whole if scale == 1.0 else whole * scale).to(x.dtype)

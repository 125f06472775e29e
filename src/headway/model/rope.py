"""Rotary positions: positions come in, cos and sin go out once per forward; each layer that rotates
turns its q and k by them.

R channels of a head are rotated, all of them unless `rotary_fraction` says otherwise. They form R/2
planes, and plane i at position p is turned by the angle p * theta^(-2i/R) (Su 2021):

    Hugging Face's layout    plane i is (x[i], x[i + R/2])
    rope_interleaved         plane i is (x[2i], x[2i + 1])

longrope has two lists of frequencies; a document uses the long ones if it is longer than
`original_max_seq_len`. Through a KV cache, where keys are stored rotated, the cache's capacity
decides instead.
"""

import math

import torch
from torch import Tensor

from headway.model.config import ModelConfig
from headway.model.rope_config import RopeScaling, yarn_growth


class Rotation:
    """The angles of one model.

    Not a module: the frequencies stay fp32 and exact when the model's dtype or device changes.
    """

    def __init__(self, config: ModelConfig) -> None:
        scaling = config.rope_scaling
        self.frequencies = inverse_frequencies(config)
        self.long: Tensor | None = None
        """Of long documents, with longrope."""
        if scaling is not None and scaling.kind == "longrope":
            self.long = inverse_frequencies(config, long=True)
        self.local: Tensor | None = None
        """Of layers with a sliding window, where they have their own base; never scaled."""
        if config.rope_local_theta is not None:
            unscaled = config.with_(rope_theta=config.rope_local_theta, rope_scaling=None)
            self.local = inverse_frequencies(unscaled)

        self.stream: Tensor | None = None
        """[R/2]: by which of three positions each plane turns; None: tokens have one position."""
        if config.vision is not None:
            self.stream = torch.tensor(config.vision.plane_axes(), device="cpu")

        self.query_growth = 0.0 if scaling is None else scaling.query_growth
        self.original = 0 if scaling is None else scaling.original_max_seq_len
        self.scale = attention_factor(scaling)
        self._on_device: dict[tuple[str, torch.device], Tensor] = {}

    def __call__(self, position: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [B, T, R/2], of int positions [B, T].

        With local frequencies [2, B, T, R/2], those second. With queries that grow the same shape:
        those of keys, and of queries.

        With positions [B, T, 3] of time, row and column (M-RoPE, Wang 2024) each plane turns by one
        of the three.

        `capacity`: of the KV cache that the rotated keys go into.
        """
        # Angles in fp32: a far position in bf16 would be rounded to one of its neighbours.
        if position.dim() == 3:
            assert self.stream is not None, "three positions need sections of planes"
            of_planes = position[..., self._moved("stream", self.stream, position.device)]
            angle = of_planes.float() * self._frequencies(position[..., 0], capacity)
        else:
            angle = position[..., None].float() * self._frequencies(position, capacity)
        cos = angle.cos() * self.scale
        sin = angle.sin() * self.scale
        if self.query_growth:
            # A rotation by longer cos and sin makes the query longer by as much.
            windows = torch.floor(position / self.original)
            growth = (1.0 + self.query_growth * torch.log1p(windows))[..., None]
            return torch.stack((cos, cos * growth)), torch.stack((sin, sin * growth))
        if self.local is None:
            return cos, sin
        local_frequencies = self._moved("local", self.local, position.device)
        local_angle = position[..., None].float() * local_frequencies
        return torch.stack((cos, local_angle.cos())), torch.stack((sin, local_angle.sin()))

    def _frequencies(self, position: Tensor, capacity: int | None) -> Tensor:
        """[R/2], or [B, T, R/2] where documents differ."""
        short = self._moved("short", self.frequencies, position.device)
        # No document is longer than its row, or than the cache.
        longest = position.shape[1] if capacity is None else capacity
        if self.long is None or longest <= self.original:
            return short

        long = self._moved("long", self.long, position.device)
        # Keys are stored rotated, so the choice cannot change when a sequence becomes long: a cache
        # with room for long ones rotates all of them so.
        if capacity is not None:
            return long
        return torch.where((document_lengths(position) > self.original)[..., None], long, short)

    def _moved(self, name: str, frequencies: Tensor, device: torch.device) -> Tensor:
        """The frequencies on a device, copied there once."""
        on_device = self._on_device.get((name, device))
        if on_device is None:
            on_device = frequencies.to(device)
            self._on_device[name, device] = on_device
        return on_device


def document_lengths(position: Tensor) -> Tensor:
    """[B, T]: how long the document of each token is; a document begins where the position does
    not go up."""
    columns = torch.arange(position.shape[1], device=position.device)
    is_last = torch.nn.functional.pad(position[:, 1:] <= position[:, :-1], (0, 1), value=True)
    # The nearest last token at or behind each token: a running minimum from the right.
    ends = torch.where(is_last, columns, position.shape[1]).flip(1).cummin(1).values.flip(1)
    return position.gather(1, ends) + 1


def inverse_frequencies(config: ModelConfig, *, long: bool = False) -> Tensor:
    """fp32 [R/2] on the CPU: angle per position of each plane; `long`: in long documents, with
    longrope."""
    size = config.rotary_size
    # fp32 from the start, as every checkpoint in use was trained: a more exact power would turn far
    # positions by another angle.
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / (config.rope_theta**exponent)

    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        divisors = scaling.long_factor if long else scaling.short_factor
        factors = torch.tensor(divisors, dtype=torch.float32, device="cpu")
        return 1.0 / (factors * config.rope_theta**exponent)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta)
    return _llama3(frequencies, scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: yarn and longrope make queries and keys longer, and so
    the attention sharper.

    Defaults as in transformers: yarn 0.1 ln(factor) + 1, or the quotient of its two growths
    (DeepSeek); longrope sqrt(1 + ln(factor) / ln(original length)).
    """
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    if scaling.kind == "yarn":
        if scaling.mscale and scaling.mscale_all_dim:
            growth = yarn_growth(scaling.factor, scaling.mscale)
            return growth / yarn_growth(scaling.factor, scaling.mscale_all_dim)
        return yarn_growth(scaling.factor)

    if scaling.factor > 1:
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_seq_len))
    return 1.0


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """YaRN (Peng 2023): fast planes stay, slow ones are divided by factor, and a linear ramp
    over the planes joins them."""
    planes = len(frequencies)

    def plane_of(turns: float) -> float:
        """The plane, as a real number, that turns this often over the original length: p
        theta^(-i/planes) = 2 pi turns."""
        positions_per_radian = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return planes * math.log(positions_per_radian) / math.log(theta)

    first = plane_of(scaling.beta_fast)
    last = plane_of(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    # The upper bound is R - 1, though there are R/2 planes: published code clamps so, and models
    # were trained with it.
    first = max(first, 0)
    last = min(last, 2 * planes - 1)
    if first == last:
        last += 0.001  # no division by zero; the value is that of published code

    plane = torch.arange(planes, dtype=torch.float32, device="cpu")
    slow = ((plane - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * slow + frequencies * (1 - slow)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: as yarn, with a ramp that is linear in the turns over the original length."""
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_seq_len / wavelength
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    share = (turns - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(turns < low, frequencies / scaling.factor, between)
    return torch.where(turns > high, frequencies, stretched)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, scale: float = 1.0
) -> Tensor:
    """Turn each head of x [B, T, heads, hd] by the angles of its position, and multiply it by
    `scale`; cos and sin are [B, T, R/2].

    The arithmetic is fp32; the result has the dtype of x.
    """
    x32 = x.float()
    size = 2 * cos.shape[-1]
    cos = cos[:, :, None]
    sin = sin[:, :, None]

    rotary = x32[..., :size]
    if interleaved:
        first = rotary[..., 0::2]
        second = rotary[..., 1::2]
    else:
        first, second = rotary.chunk(2, dim=-1)
    planes = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        turned = torch.stack(planes, dim=-1).flatten(-2)
    else:
        turned = torch.cat(planes, dim=-1)

    if size < x.shape[-1]:
        # Channels behind the rotated ones keep their values.
        turned = torch.cat((turned, x32[..., size:]), dim=-1)
    if scale != 1.0:
        turned = turned * scale
    return turned.to(x.dtype)

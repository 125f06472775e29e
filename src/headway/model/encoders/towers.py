"""Encoders that train from scratch with the aligner: a vision transformer, a convolutional network
over log-mels, a text transformer.

Shapes: N items, T positions, D width. In: a table's rows as they are stored (uint8 pixels, float32
dB, int32 bytes); out: [N, D].

Invariant: an item's vector does not depend on the other items of its microbatch, so norms are over
layers or groups of channels, never over the batch. No module draws random numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import gcd, prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.base import module_specs
from headway.model.layout import ParamSpec

BYTE_VALUES = 257
"""256 bytes, and the padding."""
# Rough mean and spread of inputs: they only have to be of the order of 1 for the first layer.
PIXEL_MEAN = 127.5
PIXEL_STD = 64.0
DB_MEAN = -40.0
DB_STD = 25.0
EMBEDDING_STD = 0.3
"""Initial spread of positions and byte embeddings (`tower_std`)."""
MELS = 64
"""Rows of a log-mel (`media.items.AudioSpec`)."""


class TowerLayer(nn.Module):
    """Attention over all positions and a feed-forward, each on the normed stream and added to
    it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.LayerNorm(width)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.o_proj = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """x [N,T,D]; `visible` [N,T]: which positions may be seen; None: all."""
        n, t, d = x.shape
        projected = self.qkv_proj(self.attn_norm(x))
        # [N,T,3,heads,hd] -> three of [N,heads,T,hd].
        q, k, v = projected.view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mask = None
        if visible is not None:
            mask = visible[:, None, None, :]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(o.transpose(1, 2).reshape(n, t, d))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x)), approximate="tanh"))


class Positions(nn.Module):
    """Adds a learned vector for every position."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.to(x.dtype)


class Tower(nn.Module, ABC):
    """An encoder that trains.

    `layers` are its blocks; the modules before and after them are called one by one.
    """

    layers: nn.ModuleDict

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """[N, *input shape] -> [N, D]."""

    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers by the prefix of their names."""
        return {f"layers.{number}": layer for number, layer in self.layers.items()}


class Cast(nn.Module):
    """A linear layer that first casts its input to the dtype it computes in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.linear.weight.dtype))


class PatchStem(Cast):
    """Cuts a picture into patches that do not overlap; one linear layer makes a vector of each."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__(3 * patch * patch, width)
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, T, D]."""
        n, c, h, w = x.shape
        p = self.patch
        # [N, C, rows, P, columns, P] -> [N, rows, columns, C, P, P].
        patches = x.view(n, c, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5)
        return super().forward(patches.reshape(n, (h // p) * (w // p), c * p * p))


class HalvingConv(nn.Module):
    """A convolution that halves height and width, and a norm over groups of channels of one
    picture."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(gcd(8, outputs), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)), approximate="tanh")


class ConvStem(nn.Module):
    """Overlapping convolutions, each of which halves the picture, up to one vector per patch:
    edges that cross patches stay visible."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        # A patch of 2^count pixels; channels double up to `width`.
        count = patch.bit_length() - 1
        channels = [3, *(max(16, width >> (count - 1 - n)) for n in range(count))]
        self.convs = nn.ModuleList(HalvingConv(*pair) for pair in pairwise(channels))
        self.linear = nn.Linear(channels[-1], width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, T, D]."""
        x = x.to(self.linear.weight.dtype)
        for conv in self.convs:
            x = conv(x)
        return self.linear(x.flatten(2).transpose(1, 2))


class VisionTower(Tower):
    """Patches of a picture through a transformer; the mean of all patches comes out.

    `patches` makes a vector of each patch.
    """

    def __init__(
        self,
        size: int,
        patches: PatchStem | ConvStem,
        patch: int,
        width: int,
        layers: int,
        heads: int,
    ) -> None:
        super().__init__()
        self.patches = patches
        self.positions = Positions((size // patch) ** 2, width)
        self.layers = nn.ModuleDict({str(n): TowerLayer(width, heads) for n in range(layers)})
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.positions(self.patches((inputs.float() - PIXEL_MEAN) / PIXEL_STD))
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x).mean(1)


class TextTower(Tower):
    """Bytes of a text through a transformer; the mean over the text comes out."""

    def __init__(self, max_bytes: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        weight = torch.empty(BYTE_VALUES, width)
        self.embed_tokens = nn.Embedding(BYTE_VALUES, width, _weight=weight)
        self.positions = Positions(max_bytes, width)
        self.layers = nn.ModuleDict({str(n): TowerLayer(width, heads) for n in range(layers)})
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        inside = inputs >= 0
        # An empty text still sees one position: a softmax over nothing is not a number.
        visible = inside | (torch.arange(inputs.shape[1], device=inputs.device) == 0)
        # Padding, -1, is the last row of the table.
        x = self.positions(self.embed_tokens(inputs.clamp(min=-1) % BYTE_VALUES))
        for layer in self.layers.values():
            x = layer(x, visible)
        # The mean over the bytes of the text; padding does not count.
        weight = visible.to(x.dtype)[..., None]
        return (self.norm(x) * weight).sum(1) / weight.sum(1)


class AudioStage(nn.Module):
    """Halves mels and frames, then adds what two convolutions find."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down_conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1)
        self.in_norm = nn.GroupNorm(min(8, outputs), outputs)
        self.up_conv = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.out_norm = nn.GroupNorm(min(8, outputs), outputs)
        self.out_conv = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down_conv(x)
        inner = self.up_conv(F.gelu(self.in_norm(x), approximate="tanh"))
        return x + self.out_conv(F.gelu(self.out_norm(inner), approximate="tanh"))


class StemConv(nn.Module):
    """The first convolution, which halves mels and frames; casts its input to the dtype it
    computes in."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, outputs, 5, stride=2, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.to(self.conv.weight.dtype))


class AudioTower(Tower):
    """A log-mel through convolutions; the mean over what is left of time and pitch, each pitch
    with its own place, comes out."""

    def __init__(self, width: int, stages: int) -> None:
        super().__init__()
        channels = [max(16, width >> (stages - 1 - n)) for n in range(stages)]
        self.stem = StemConv(channels[0])
        self.layers = nn.ModuleDict(
            {str(n): AudioStage(channels[max(0, n - 1)], channels[n]) for n in range(stages)}
        )
        # Each stage halves the mels, after the stem has halved them.
        rows = max(1, MELS >> (stages + 1))
        self.norm = nn.LayerNorm(width * rows)
        self.out_proj = nn.Linear(width * rows, width)

    def forward(self, inputs: Tensor) -> Tensor:
        # One channel, as a picture of mels and frames.
        x = self.stem(((inputs - DB_MEAN) / DB_STD)[:, None])
        for layer in self.layers.values():
            x = layer(x)
        # The mean over time; rows of pitch stay apart, since pitch has a meaning.
        return self.out_proj(self.norm(x.mean(3).flatten(1)))


def tower_specs(module: nn.Module) -> list[ParamSpec]:
    """The parameters of towers and heads, however they are nested in a module."""
    specs: list[ParamSpec] = []
    for spec in module_specs(module):
        path, _, leaf = spec.name.rpartition(".")
        inner = module.get_submodule(path)
        owner = module.get_submodule(path.rpartition(".")[0])
        if isinstance(inner, (Positions, nn.Embedding)):
            spec = replace(spec, start="table")
        elif isinstance(owner, AudioStage) and inner is owner.out_conv and leaf == "weight":
            spec = replace(spec, start="residual")
        specs.append(spec)
    return specs


def tower_std(spec: ParamSpec, layers: int) -> float:
    """The standard deviation of the initial value of a parameter of a tower with so many layers, or
    of a head.

    Matrices keep the variance of their input: 1 / sqrt(inputs). What adds to a stream starts
    smaller, by sqrt(2 layers), so that depth does not matter. Positions are of the size of what
    they are added to: with 0.02 a small tower learned places and shapes half as well.
    """
    if spec.start == "table":
        return EMBEDDING_STD
    std = 1 / sqrt(max(1, prod(spec.shape[1:])))
    if spec.start == "residual":
        std /= sqrt(2 * layers)
    return std

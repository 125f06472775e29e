"""MobileNetV4-conv-small (Qin 2024) as timm's file names its weights: a stem, plain convolutions,
universal inverted bottlenecks; ReLU.

Shapes: N pictures [N,3,224,224] -> [N,960,7,7]. A bottleneck is up to four convolutions: a
depthwise one, a wide pointwise one, a depthwise one, a narrow pointwise one; the first and the
third exist if their kernel is not 0. The head for classes is not used.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.encoders.frozen import Pixels
from headway.model.encoders.weight_file import fill_exactly, read_weights

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and spread of ImageNet's pixels, red, green and blue, in 0..1."""
STEM = 32
"""Channels behind the stem."""
WIDTH = 960
"""Channels of the features."""
PLAIN = (((3, 2, 32), (1, 1, 32)), ((3, 2, 96), (1, 1, 64)))
"""Two stages of plain convolutions: kernel, stride, channels."""
INVERTED = (
    ((5, 5, 2, 3, 96), *((0, 3, 1, 2, 96),) * 4, (3, 0, 1, 4, 96)),
    (
        (3, 3, 2, 6, 128),
        (5, 5, 1, 4, 128),
        (0, 5, 1, 4, 128),
        (0, 5, 1, 3, 128),
        *((0, 3, 1, 4, 128),) * 2,
    ),
)
"""Two stages of bottlenecks: kernel of the first and of the second depthwise convolution,
stride, expansion, channels."""
UNUSED = ("conv_head.", "norm_head.", "classifier.")


class ConvNorm(nn.Module):
    """A convolution and its norm, with a ReLU or without."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        active: bool = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False
        )
        self.bn = nn.BatchNorm2d(outputs)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        if self.active:
            return F.relu(x)
        return x


class PlainConv(nn.Module):
    """A convolution with norm and ReLU; timm calls its norm bn1."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn1(self.conv(x)))


class UniversalBottleneck(nn.Module):
    """A universal inverted bottleneck; it adds its input where shapes allow.

    The last depthwise convolution has the stride.
    """

    def __init__(
        self, inputs: int, kernels: tuple[int, int], stride: int, expansion: int, outputs: int
    ) -> None:
        super().__init__()
        first, second = kernels
        wide = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        if first:
            first_stride = 1 if second else stride
            self.dw_start = ConvNorm(inputs, inputs, first, first_stride, inputs, active=False)
        self.pw_exp = ConvNorm(inputs, wide, 1)
        if second:
            self.dw_mid = ConvNorm(wide, wide, second, stride, wide)
        self.pw_proj = ConvNorm(wide, outputs, 1, active=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.children():  # in the order in which they were assigned
            y = layer(y)
        if self.adds:
            return x + y
        return y


class MobileNetV4(nn.Module):
    """Features of pictures."""

    def __init__(self) -> None:
        super().__init__()
        # Names of modules are keys of timm's file.
        self.conv_stem = nn.Conv2d(3, STEM, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        channels = STEM
        stages = list[nn.Module]()
        for stage in PLAIN:
            layers: list[nn.Module] = []
            for kernel, stride, outputs in stage:
                layers.append(PlainConv(channels, outputs, kernel, stride))
                channels = outputs
            stages.append(nn.Sequential(*layers))
        for stage in INVERTED:
            layers = []
            for first, second, stride, expansion, outputs in stage:
                layers.append(
                    UniversalBottleneck(channels, (first, second), stride, expansion, outputs)
                )
                channels = outputs
            stages.append(nn.Sequential(*layers))
        self.blocks = nn.Sequential(*stages, nn.Sequential(PlainConv(channels, WIDTH, 1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """[N,3,H,W] -> [N,960,H/32,W/32]."""
        return self.blocks(F.relu(self.bn1(self.conv_stem(x))))


class MobileNetV4Encoder(nn.Module):
    """Pixels to vectors: their mean, or one per place."""

    def __init__(self, network: MobileNetV4, pooled: bool) -> None:
        super().__init__()
        self.pixels = Pixels(MEAN, STD)
        self.network = network
        self.pooled = pooled

    def forward(self, inputs: Tensor) -> Tensor:
        """uint8 [N,3,224,224] -> [N,1,960] or [N,49,960]."""
        vectors = self.network(self.pixels(inputs)).flatten(2).transpose(1, 2)
        if self.pooled:
            return vectors.mean(1, keepdim=True)
        return vectors


def load_mobilenet_v4(path: Path, key: str) -> MobileNetV4:
    """The network with the weights of a file."""
    with torch.device("meta"):
        network = MobileNetV4()
    fill_exactly(network, read_weights(path, key), path, UNUSED)
    return network

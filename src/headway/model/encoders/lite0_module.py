"""EfficientNet-Lite0 as the file of its weights names it: a stem, 16 inverted bottlenecks without
squeeze-and-excitation, a head; ReLU6.

Shapes: N pictures [N,3,224,224] -> [N,1280,7,7]. Strided convolutions pad as TensorFlow's SAME
does, on the right and below first. Names with an underscore are those of the file.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.encoders.frozen import Pixels
from headway.model.encoders.weight_file import fill_exactly
from headway.model.loading.untrusted import open_pickled

STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Repeats, kernel, stride of the first, expansion, channels."""
EPS = 1e-3
"""Epsilon of the batch norms, as TensorFlow's network was trained."""
STEM = 32
"""Channels behind the stem."""
HEAD = 1280
"""Channels of the features."""
CLASSES = 1000
MEAN = 127.0
STD = 128.0
"""Mean and spread of pixels of 0..255, in all channels."""


class SameConv(nn.Conv2d):
    """A convolution whose output has ceil(size / stride) places."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        kernel = self.kernel_size[0]
        stride = self.stride[0]
        pads: list[int] = []
        for size in (input.shape[3], input.shape[2]):
            # What is needed for ceil(size / stride) windows; an odd pixel goes right or below.
            missing = max(0, (-(-size // stride) - 1) * stride + kernel - size)
            pads += [missing // 2, missing - missing // 2]
        return super().forward(F.pad(input, pads))


class Bottleneck(nn.Module):
    """Widen, filter each channel, narrow; added to the input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        if expansion > 1:
            self._expand_conv = SameConv(inputs, wide, 1)
            self._bn0 = nn.BatchNorm2d(wide, EPS)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = nn.BatchNorm2d(wide, EPS)
        self._project_conv = SameConv(wide, outputs, 1)
        self._bn2 = nn.BatchNorm2d(outputs, EPS)
        self.widens = expansion > 1
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        if self.widens:
            y = F.relu6(self._bn0(self._expand_conv(x)))
        else:
            y = x
        y = self._bn2(self._project_conv(F.relu6(self._bn1(self._depthwise_conv(y)))))
        if self.adds:
            return x + y
        return y


class EfficientNetLite0(nn.Module):
    """Features of pictures: EfficientNet-Lite0 without its classification."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv(3, STEM, 3, 2)
        self._bn0 = nn.BatchNorm2d(STEM, EPS)
        blocks: list[Bottleneck] = []
        channels = STEM
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for _ in range(repeats):
                blocks.append(Bottleneck(channels, outputs, kernel, stride, expansion))
                channels = outputs
                stride = 1  # only the first of a stage makes the picture smaller
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = SameConv(channels, HEAD, 1)
        self._bn1 = nn.BatchNorm2d(HEAD, EPS)
        # Not used: published files hold the head of ImageNet's classes, and all of a file is read.
        self._fc = nn.Linear(HEAD, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[N,3,H,W] -> [N,1280,H/32,W/32]."""
        x = F.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        return F.relu6(self._bn1(self._conv_head(x)))


class Lite0Encoder(nn.Module):
    """Pixels to vectors: their mean, or one per place."""

    def __init__(self, network: EfficientNetLite0, pooled: bool) -> None:
        super().__init__()
        self.pixels = Pixels((MEAN,) * 3, (STD,) * 3, 1.0)
        self.network = network
        self.pooled = pooled

    def forward(self, inputs: Tensor) -> Tensor:
        """uint8 [N,3,224,224] -> [N,1,1280] or [N,49,1280]."""
        vectors = self.network(self.pixels(inputs)).flatten(2).transpose(1, 2)
        if self.pooled:
            return vectors.mean(1, keepdim=True)
        return vectors


def load_lite0(path: Path) -> EfficientNetLite0:
    """The network with the weights of a file; names and shapes must be exactly those expected."""
    with torch.device("meta"):
        network = EfficientNetLite0()
    fill_exactly(network, open_pickled(path), path)
    return network

"""CNN14 as the file of PANNs (Kong 2020) names its weights: a norm over mels, six pairs of
convolutions, pooling over time and pitch, one linear.

Shapes: N log-mels [N,64,T] in dB -> [N,1,width of fc1]. The file's own spectrogram and its classes
are not used: our log-mel is that spectrogram. Channels are read from the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import CheckpointError
from headway.media.purrsight import MELS, N_FFT
from headway.model.encoders.weight_file import fill_exactly, read_weights

BLOCKS = 6
MEL_FILTERS = "logmel_extractor.melW"
UNUSED = ("spectrogram_extractor.", "logmel_extractor.", "fc_audioset.")


class ConvPair(nn.Module):
    """Two convolutions with norms and ReLUs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Cnn14(nn.Module):
    """The vector of a sound."""

    def __init__(self, channels: list[int], width: int, *, is_purrsight: bool = False) -> None:
        super().__init__()
        self.is_purrsight = is_purrsight
        """PurrSight's copy of the network takes the mean of all places and leaves out the last
        ReLU."""
        self.bn0 = nn.BatchNorm2d(MELS)
        inputs = 1
        for number, outputs in enumerate(channels, start=1):
            setattr(self, f"conv_block{number}", ConvPair(inputs, outputs))
            inputs = outputs
        self.fc1 = nn.Linear(channels[-1], width)

    def forward(self, inputs: Tensor) -> Tensor:
        """[N,64,T] -> [N,1,width]."""
        # The norm is over mels; the convolutions see [N,1,T,64].
        x = self.bn0(inputs[..., None]).permute(0, 3, 2, 1)
        for number in range(1, BLOCKS + 1):
            x = getattr(self, f"conv_block{number}")(x)
            if number != BLOCKS:
                x = F.avg_pool2d(x, 2)
        if self.is_purrsight:
            return self.fc1(x.mean((2, 3)))[:, None]
        # PANNs: mean over pitch, then the maximum and the mean over time.
        x = x.mean(3)
        return F.relu(self.fc1(x.amax(2) + x.mean(2)))[:, None]


def load_cnn14(path: Path, key: str, *, is_purrsight: bool = False) -> Cnn14:
    """The network with the weights of a file."""
    tensors = read_weights(path, key)
    channels: list[int] = []
    for number in range(1, BLOCKS + 1):
        weight = tensors.get(f"conv_block{number}.conv2.weight")
        if weight is not None and weight.ndim == 4:
            channels.append(weight.shape[0])
    last = tensors.get("fc1.weight")
    if len(channels) < BLOCKS or last is None or last.ndim != 2:
        raise CheckpointError(
            f"{path}: is no CNN14 of PANNs: it lacks its six blocks or fc1. Give "
            "Cnn14_16k_mAP=0.438.pth."
        )
    with torch.device("meta"):
        network = Cnn14(channels, last.shape[0], is_purrsight=is_purrsight)
    fill_exactly(network, tensors, path, UNUSED)
    return network


def mel_filters_of(path: Path, key: str) -> np.ndarray:
    """The mel filters that a file of PANNs brings along, `[257, 64]`; PurrSight computes with
    them."""
    filters = read_weights(path, key).get(MEL_FILTERS)
    shape = (1 + N_FFT // 2, MELS)
    if filters is None or tuple(filters.shape) != shape or not bool(filters.isfinite().all()):
        stored = "missing" if filters is None else f"of shape {list(filters.shape)}"
        raise CheckpointError(
            f"{path}: {MEL_FILTERS} is {stored}; finite numbers of shape {list(shape)} are "
            "expected. Fetch the file again."
        )
    return filters.float().numpy()

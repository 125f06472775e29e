"""What frozen encoders share: a torch module in evaluation mode on one device, arrays in and
out, and the identity of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from headway.data.config import default_cache_dir
from headway.prepare.media_inputs import Array, MediaInputSpec
from headway.store.checksums import Checksums


class FrozenModule:
    """A `FrozenMediaEncoder` around a module whose forward takes inputs [n, *input.shape] and
    gives [n, tokens, width]."""

    def __init__(
        self, modality: str, module: nn.Module, input_spec: MediaInputSpec, identity: str
    ) -> None:
        self.modality = modality
        self.input = input_spec
        self.identity = identity
        self.module = module.eval().requires_grad_(False)
        # One item of zeros shows the shape of the features.
        features = self.encode(np.zeros((1, *input_spec.shape), input_spec.dtype))
        self.tokens = int(features.shape[1])
        self.width = int(features.shape[2])

    def to(self, device: torch.device | str) -> Self:
        """Compute on this device."""
        self.module.to(device)
        return self

    @torch.no_grad()
    def encode(self, inputs: Array) -> Array:
        """float32 [n, tokens, width]."""
        # Where the module is now: `to` may have moved it.
        device = next(self.module.parameters()).device
        features: Tensor = self.module(torch.from_numpy(np.ascontiguousarray(inputs)).to(device))
        return features.float().cpu().numpy()


class Pixels(nn.Module):
    """uint8 pixels as a network expects them: (pixels * factor - mean) / std."""

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], factor: float = 1 / 255
    ) -> None:
        super().__init__()
        self.factor = factor
        self.register_buffer("mean", torch.tensor(list(mean)).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).view(3, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels.float() * self.factor - self.mean) / self.std  # pyright: ignore[reportOperatorIssue]


def files_identity(files: Sequence[Path]) -> str:
    """A hash of the names and contents of files; large files are read once, their checksums are
    cached."""
    checksums = Checksums(default_cache_dir()).of_all(list(files))
    content = [(path.name, checksum) for path, checksum in zip(files, checksums, strict=True)]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:32]

"""What frozen encoders share: a torch module in evaluation mode on one device, arrays in and out, and the identity of its files."""

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
    """An `FrozenMediaEncoder` around a module whose forward takes inputs [n, *input.shape] and gives [n, tokens, width]."""

    def __init__(
        self, modality: str, module: nn.Module, source: MediaInputSpec, identity: str
    ) -> None:
        self.modality, self.input, self.identity = modality, source, identity
        self.module = module.eval().requires_grad_(False)
        found = self.encode(np.zeros((1, *source.shape), source.dtype))
        self.tokens, self.width = int(found.shape[1]), int(found.shape[2])

    def to(self, device: torch.device | str) -> Self:
        """Compute on this device."""
        self.module.to(device)
        return self

    @torch.no_grad()
    def encode(self, inputs: Array) -> Array:
        """float32 [n, tokens, width]."""
        device = next(self.module.parameters()).device
        found: Tensor = self.module(torch.from_numpy(np.ascontiguousarray(inputs)).to(device))
        return found.float().cpu().numpy()


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
    """A hash of the names and contents of files; large files are read once, their checksums are cached."""
    found = Checksums(default_cache_dir()).of_all(list(files))
    return hashlib.sha256(
        repr([(path.name, one) for path, one in zip(files, found, strict=True)]).encode()
    ).hexdigest()[:32]

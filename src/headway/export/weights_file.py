"""Safetensors files that are the same to the byte for the same tensors: the library writes the notes of the header in any order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LENGTH_BYTES = 8


def save_weights(tensors: dict[str, torch.Tensor], path: Path, notes: dict[str, str]) -> None:
    """Write a safetensors file with these notes (its metadata), sorted."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=notes)
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(notes.items()))
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(content) <= length, "the same notes in another order take the same room"
        file.seek(LENGTH_BYTES)
        file.write(content.ljust(length))

"""Weights stored in 8-bit floats with a scale for each block of a matrix, as DeepSeek V3 is
published: the open files of a folder come in, files that give the tensors in bf16 go out. One
tensor is read at a time.

    NAME               float8_e4m3fn [out, in]
    NAME_scale_inv     float32 [ceil(out / rows), ceil(in / columns)]; each block of the matrix is multiplied by its number
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SCALE = "_scale_inv"
"""Ends the names of scales. They are multiplied, in spite of their name."""
FP8 = ("F8_E4M3", "float8_e4m3fn")
"""The type, as safetensors and as torch call it."""


class BlockSize(NamedTuple):
    """Rows and columns of the matrix that share a scale."""

    rows: int
    columns: int


def block_size(config: Mapping[str, Any]) -> BlockSize | None:
    """The blocks of a config.json whose weights are stored so; None for other forms, and for
    none."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "fp8":
        return None
    if settings.get("fmt", "e4m3") not in (None, "e4m3"):
        return None
    # Static scales of activations are tensors too, which nothing here would read.
    if settings.get("activation_scheme", "dynamic") not in (None, "dynamic"):
        return None

    size: Any = settings.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size):
        return None
    return BlockSize(*size)


def without_scales(stored: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Tensors and their files without those of scales; and those of scales, by the tensor they
    belong to."""
    tensors: dict[str, str] = {}
    scales: dict[str, str] = {}
    for name, file in stored.items():
        scaled = name.removesuffix(SCALE)
        if name.endswith(SCALE) and scaled in stored:
            scales[scaled] = file
        else:
            tensors[name] = file
    return tensors, scales


def dequantised(
    name: str, value: torch.Tensor, scale: torch.Tensor, block: BlockSize
) -> torch.Tensor:
    """bf16 of an 8-bit matrix and its scales."""
    import torch

    blocks = tuple(-(-size // extent) for size, extent in zip(value.shape, block, strict=False))
    if value.dim() != 2 or tuple(scale.shape) != blocks:
        raise CheckpointError(
            f"{name}{SCALE} has shape {list(scale.shape)} and {name} {list(value.shape)}; blocks of {list(block)} make it {list(blocks)}. "
            "Download the model again."
        )

    # Scales [rows of blocks, columns of blocks] -> [out, columns of blocks].
    rows = scale.float().repeat_interleave(block.rows, dim=0)[: value.shape[0]]
    result = torch.empty(value.shape, dtype=torch.bfloat16)
    # A strip of blocks at a time: no whole matrix exists in fp32.
    for first in range(0, value.shape[1], block.columns):
        strip = slice(first, first + block.columns)
        scaled = value[:, strip].float() * rows[:, first // block.columns, None]
        result[:, strip] = scaled.bfloat16()
    return result


class BlockFile:
    """An open safetensors file whose 8-bit tensors are read in bf16."""

    def __init__(
        self,
        file: Any,
        block: BlockSize,
        scaled: Collection[str],
        scale_of: Callable[[str], torch.Tensor],
    ) -> None:
        """`scaled`: the tensors that have scales, which `scale_of` reads."""
        self.file = file
        self.block = block
        self.scaled = scaled
        self.scale_of = scale_of

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        value = self.file.get_tensor(name)
        if name in self.scaled:
            return dequantised(name, value, self.scale_of(name), self.block)
        return value

    def get_slice(self, name: str) -> BlockSlice:
        """One tensor, of which shape, type or a part is read."""
        return BlockSlice(self, name)


class BlockSlice:
    """The interface of a safetensors slice."""

    def __init__(self, file: BlockFile, name: str) -> None:
        self.file = file
        self.name = name
        self.plain = file.file.get_slice(name)

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return self.plain.get_shape()

    def get_dtype(self) -> str:
        """Type in which it is read."""
        stored = self.plain.get_dtype()
        if stored in FP8 and self.name in self.file.scaled:
            return "BF16"
        return stored

    def __getitem__(self, part: Any) -> torch.Tensor:
        # Parts cut through blocks, so the whole tensor is read.
        return self.file.get_tensor(self.name)[part]

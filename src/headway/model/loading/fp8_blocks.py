"""Weights stored in 8-bit floats with a scale for each block of a matrix, as DeepSeek V3 is published: the open files of a folder come in,
files that give the tensors in bf16 go out. One tensor is read at a time.

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
FP8 = ("F8_E4M3", "float8_e4m3fn")


class BlockSize(NamedTuple):
    """Rows and columns of the matrix that share a scale."""

    rows: int
    columns: int


def block_size(config: Mapping[str, Any]) -> BlockSize | None:
    """The blocks of a config.json whose weights are stored so; None for other forms, and for none."""
    given = config.get("quantization_config")
    if not isinstance(given, Mapping) or given.get("quant_method") != "fp8":
        return None
    size: Any = given.get("weight_block_size")
    whole = (
        isinstance(size, list)
        and len(size) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size)
    )
    plain = given.get("fmt", "e4m3") in (None, "e4m3") and given.get(
        "activation_scheme", "dynamic"
    ) in (None, "dynamic")
    return BlockSize(*size) if whole and plain else None


def without_scales(stored: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Tensors and their files without those of scales; and those of scales, by the tensor they belong to."""
    scales: dict[str, str] = {}
    for name, file in stored.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in stored:
            scales[name.removesuffix(SCALE)] = file
    return {
        name: file
        for name, file in stored.items()
        if not name.endswith(SCALE) or name.removesuffix(SCALE) not in scales
    }, scales


def dequantised(
    name: str, value: torch.Tensor, scale: torch.Tensor, block: BlockSize
) -> torch.Tensor:
    """bf16 of an 8-bit matrix and its scales."""
    import torch

    wanted = tuple(-(-size // each) for size, each in zip(value.shape, block, strict=False))
    if value.dim() != 2 or tuple(scale.shape) != wanted:
        raise CheckpointError(
            f"{name}{SCALE} has shape {list(scale.shape)} and {name} {list(value.shape)}; blocks of {list(block)} make it {list(wanted)}. "
            "Download the model again."
        )
    rows = scale.float().repeat_interleave(block.rows, dim=0)[: value.shape[0]]
    result = torch.empty(value.shape, dtype=torch.bfloat16)
    for first in range(
        0, value.shape[1], block.columns
    ):  # a strip of blocks at a time: no whole matrix exists in fp32
        strip = slice(first, first + block.columns)
        result[:, strip] = (
            value[:, strip].float() * rows[:, first // block.columns, None]
        ).bfloat16()
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
        self.file, self.block, self.scaled, self.scale_of = file, block, scaled, scale_of

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        value = self.file.get_tensor(name)
        return (
            dequantised(name, value, self.scale_of(name), self.block)
            if name in self.scaled
            else value
        )

    def get_slice(self, name: str) -> BlockSlice:
        """One tensor, of which shape, type or a part is wanted."""
        return BlockSlice(self, name)


class BlockSlice:
    """The interface of a safetensors slice."""

    def __init__(self, file: BlockFile, name: str) -> None:
        self.file, self.name = file, name
        self.plain = file.file.get_slice(name)

    def get_shape(self) -> list[int]:
        """Shape of the whole tensor."""
        return self.plain.get_shape()

    def get_dtype(self) -> str:
        """Type in which it is read."""
        found = self.plain.get_dtype()
        return "BF16" if found in FP8 and self.name in self.file.scaled else found

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self.file.get_tensor(self.name)[part]

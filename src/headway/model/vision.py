"""Pictures in a published model: cells of pixels come in, embeddings at their positions in the
stream go out; the tower between them is the class of transformers.

Shapes: B rows, T tokens, D width of the stream, C cells that a row may have, I pictures that a row
may have, N cells of all rows together.

    cells [B,C,...] -> patches of all pictures, one after another -> tower -> features [N,F]
    slot  [B,T]     which of its row's cells stands at a position; -1 for text
    position [B,T,3] the time, row and column by which a position is rotated (media/patches.py)

F = (1 + L) D: the embedding of a cell, then what is added to it behind each of the first L layers
of the decoder (DeepStack, Meng 2024, https://arxiv.org/abs/2406.04334; Qwen3-VL). L is 0 for towers
without it.

The tower sees each picture alone: attention inside it never crosses pictures, so it does not matter
which of them share a row. A batch without pictures passes one grey cell through the tower, which
nothing reads: every rank and microbatch runs the same parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.model.layout import ParamSpec, in_groups
from headway.model.vision_shape import KINDS, TOWER, VisionShape
from headway.runtime.optional import need

if TYPE_CHECKING:
    from headway.data.batch import Batch

SLOT = "picture.slot"
"""The batch column [B,T] of cells; int32."""
POSITION = "picture.position"
CELLS = "picture.cells"
GRID = "picture.grid"
"""The batch column [B,I,2]: rows and columns of cells of each picture; zeros where there is none."""
ATTENTION = "sdpa"
"""How the tower attends, in the words of transformers."""


@dataclass(frozen=True)
class PictureTensors:
    """The pictures of some rows, and the positions of all their tokens."""

    position: Tensor
    """int32 [B,T,3]; [B,T] where there is text alone."""
    slot: Tensor | None = None
    """int32 [B,T]; None: text alone."""
    cells: Tensor | None = None
    """uint8 [B,C,...]"""
    grid: Tensor | None = None
    """int32 [B,I,2]"""
    features: Tensor | None = None
    """[N,F] of one row whose pictures have passed the tower before."""

    @classmethod
    def of(cls, batch: Batch) -> PictureTensors | None:
        """The pictures of a batch; None where it has no column for them."""
        if SLOT not in batch.extra:
            return None
        columns = batch.extra
        return cls(columns[POSITION], columns[SLOT], columns[CELLS], columns[GRID])

    def rotary(self, position: Tensor) -> Tensor:
        """The positions by which tokens are rotated, in place of `position` [B,T]."""
        return self.position

    def placed(
        self, tower: nn.Module, shape: VisionShape, dtype: torch.dtype
    ) -> PlacedCells | None:
        """The features of all cells at their positions; None: text alone."""
        if self.slot is None:
            return None
        if self.features is not None:
            features = self.features.to(dtype)
            begins = torch.zeros(1, dtype=torch.int64, device=features.device)
        else:
            features, begins = self._encoded(tower, shape, dtype)

        slot = torch.where(self.slot >= 0, self.slot + begins[:, None], -1).flatten()
        is_cell = slot >= 0
        # Text positions point at different cells: with one for all of them, the backward would add
        # their zeros to the same row one after another.
        spread = torch.arange(len(slot), device=slot.device) % len(features)
        index = torch.where(is_cell, slot, spread)
        return PlacedCells(features, index, is_cell.view(self.slot.shape)[..., None])

    def _encoded(
        self, tower: nn.Module, shape: VisionShape, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The features [N,F] of all cells, and where those of each row begin [B]."""
        assert self.cells is not None and self.grid is not None
        # Sizes of pictures decide shapes and windows, so the host must know them.
        grids_of_rows = [
            [(rows, columns) for rows, columns in row if rows] for row in self.grid.tolist()
        ]
        counts = [sum(rows * columns for rows, columns in row) for row in grids_of_rows]
        used = [cells[:count] for cells, count in zip(self.cells, counts, strict=True)]
        begins = torch.tensor([0, *counts[:-1]], device=self.cells.device).cumsum(0)
        grids = [grid for row in grids_of_rows for grid in row]
        if not grids:
            grids = [(1, 1)]
            used = [self.cells.new_full((1, *self.cells.shape[2:]), 128)]
        return run_tower(tower, shape, torch.cat(used), grids, dtype), begins


@dataclass(frozen=True)
class PlacedCells:
    """Features of cells, and which of them stands at each position."""

    features: Tensor
    """[N,F]"""
    index: Tensor
    """[B*T]: a cell for each position, for those of text any."""
    is_cell: Tensor
    """bool [B,T,1]"""

    def into(self, x: Tensor) -> Tensor:
        """The stream at the bottom [B,T,D], with embeddings of cells at their positions."""
        return torch.where(self.is_cell, self._part(0, x), x)

    def behind(self, layer: int, x: Tensor) -> Tensor:
        """The stream behind a layer of the decoder, with what the tower adds there."""
        if (layer + 2) * x.shape[-1] > self.features.shape[-1]:
            return x
        return torch.where(self.is_cell, x + self._part(layer + 1, x), x)

    def _part(self, number: int, x: Tensor) -> Tensor:
        """[B,T,D]: one of the vectors of each position's cell."""
        width = x.shape[-1]
        vectors = self.features[:, number * width : (number + 1) * width]
        return vectors[self.index].view(x.shape)


def text_alone(position: Tensor) -> PictureTensors:
    """Tokens without pictures at given positions [B,T]."""
    return PictureTensors(position)


def run_tower(
    tower: nn.Module,
    shape: VisionShape,
    cells: Tensor,
    grids: list[tuple[int, int]],
    dtype: torch.dtype,
) -> Tensor:
    """[N,F] of the cells [N,...] of some pictures; `grids`: rows and columns of cells of each."""
    merge = shape.spec.merge
    sizes = [[1, rows * merge, columns * merge] for rows, columns in grids]
    # On the host: the tower makes windows of them with Python numbers.
    grid = torch.tensor(sizes, device=cells.device)
    patches = to_patches(cells, shape)
    output = tower(patches.to(dtype), grid_thw=grid)
    if not shape.deepstack_layers:
        return output.pooler_output
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


def to_patches(cells: Tensor, shape: VisionShape) -> Tensor:
    """fp32 [N merge merge, numbers of a patch] of cells uint8 [N,...]."""
    spec = shape.spec
    values = torch.from_numpy(spec.values()).to(cells.device)
    pixels = cells.view(-1, 3, spec.patch, spec.patch).long()
    first_of_colour = 256 * torch.arange(3, device=cells.device)[:, None, None]
    normalised = values.flatten()[pixels + first_of_colour]
    # A picture is a video that stands still: each patch has it in every frame.
    frames = normalised[:, :, None].expand(-1, -1, spec.frames, -1, -1)
    return frames.reshape(len(pixels), spec.patch_width)


def build_tower(shape: VisionShape) -> nn.Module:
    """The tower, its parameters uninitialized on the default device."""
    from headway.model.stock.values import computed_values

    with torch.device("meta"):
        tower = _tower_class(shape)
    # What the class computes of its config are no buffers here, so `to_empty` does not lose them.
    computed_values(tower)
    default = torch.get_default_device()
    if default.type != "meta":
        tower = tower.to_empty(device=default)
    return tower


def _tower_class(shape: VisionShape) -> Any:
    need("transformers", f"model_type {shape.kind}")
    from headway.model.stock.classes import foreign, quiet

    kind = KINDS[shape.kind]
    package = f"transformers.models.{kind.module}"
    with foreign("vision_config"), quiet():
        configuration: Any = import_module(f"{package}.configuration_{kind.module}")
        modeling: Any = import_module(f"{package}.modeling_{kind.module}")
        config = getattr(configuration, kind.config_class)(**shape.tower)
        config._attn_implementation = ATTENTION
        return getattr(modeling, kind.tower_class)._from_config(
            config, attn_implementation=ATTENTION, dtype=torch.float32
        )


def tower_specs(shape: VisionShape) -> list[ParamSpec]:
    """Every parameter of the tower, in its order."""
    return list(_specs(json.dumps(_plain(shape), sort_keys=True)))


def _plain(shape: VisionShape) -> dict[str, Any]:
    return {**vars(shape), "tower": dict(shape.tower), "picture": dict(shape.picture)}


@lru_cache(maxsize=8)
def _specs(key: str) -> tuple[ParamSpec, ...]:
    from headway.model.base import module_specs

    shape = VisionShape.parse(json.loads(key))
    with torch.device("meta"):
        tower = _tower_class(shape)
    linear = {
        f"{path}.weight" for path, module in tower.named_modules() if isinstance(module, nn.Linear)
    }
    specs: list[ParamSpec] = []
    for spec in module_specs(tower):
        groups = spec.groups | in_groups("tower")
        start = spec.start
        if spec.name in linear:
            groups |= in_groups("linear")
        elif len(spec.shape) == 1 and "bias" not in groups:
            # Norms of the class have names of their own.
            groups |= in_groups("norm")
            start = "norm"
        specs.append(replace(spec, name=TOWER + spec.name, groups=groups, start=start))
    return tuple(specs)

"""The aligner: features or inputs of several modalities come in, unit vectors of one width go out, so that equal meanings lie together.

    media [B, ...] -> tower (own encoders that train) -> features [B, W] -> norm -> projection without bias -> / length -> [B, D]

Features of frozen encoders come from a table and enter the head as they are. Absent media give the vector zero and no gradient, whatever
the zeros in their place make of the tower. Names of heads follow PurrSight's aligner (`export/aligner.py` reads and writes its files).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.data.samples import MEDIA, PRESENT
from headway.model.base import Embeddings, LMHead, Model, ModelOut
from headway.model.encoders.towers import Tower, tower_specs, tower_value
from headway.model.layout import ParamSpec

if TYPE_CHECKING:
    from headway.data.batch import Batch
    from headway.model.config import ModelConfig


class AlignHead(nn.Module):
    """LayerNorm and a projection without bias, to a vector of length 1 in fp32; the zero vector stays zero."""

    def __init__(self, width: int, dim: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] -> fp32 [..., D]."""
        return F.normalize(self.proj(self.norm(x.to(self.proj.weight.dtype))).float(), dim=-1)


class Aligner(Model):
    """Towers that train, and one head per modality."""

    is_random = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        aligner = config.aligner
        assert aligner is not None
        self.names, self.dim = aligner.modalities, aligner.dim
        self.towers = nn.ModuleDict(
            {name: one.tower() for name, one in aligner.encoders.items() if one.TRAINS}
        )
        self.heads = nn.ModuleDict(
            {
                name: AlignHead(aligner.width_of(name), aligner.dim, aligner.norm_eps)
                for name in self.names
            }
        )

    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        """The vectors of a microbatch's samples; nothing is sampled."""
        present = torch.stack([batch.extra[f"{PRESENT}{name}"] for name in self.names], dim=1)
        values = self({name: batch.extra[f"{MEDIA}{name}"] for name in self.names}, present)
        head = LMHead(values, values.new_zeros(0, self.dim), self.chunk_tokens)
        return ModelOut(head, embeddings=Embeddings(self.names, values, present))

    def forward(self, media: Mapping[str, Tensor], present: Tensor) -> Tensor:
        """fp32 [B, modalities, D]."""
        found = [self.embed(name, media[name]) for name in self.names]
        return torch.where(present[..., None], torch.stack(found, dim=1), 0.0)

    def embed(self, name: str, media: Tensor) -> Tensor:
        """The vectors [n, D] of one modality: inputs of its tower, or features [n, 1, W] of its frozen encoder."""
        return self.heads[name](self.features(name, media))

    def features(self, name: str, media: Tensor) -> Tensor:
        """What enters the head of a modality, [n, W]."""
        return self.towers[name](media) if name in self.towers else media.flatten(1)

    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers of each tower, then its head."""
        found: dict[str, nn.Module] = {}
        for name in self.names:
            if name in self.towers:
                tower = self.towers[name]
                assert isinstance(tower, Tower)
                found |= {f"towers.{name}.{path}": layer for path, layer in tower.blocks().items()}
            found[f"heads.{name}"] = self.heads[name]
        return found

    def param_specs(self) -> list[ParamSpec]:
        """As its towers describe them."""
        return tower_specs(self)

    @property
    def head_weight(self) -> Tensor:
        """There is no vocabulary."""
        return torch.zeros(0, self.dim)

    @property
    def head_parameter(self) -> None:
        """None."""
        return None


def aligner_value(spec: ParamSpec, config: ModelConfig, seed: int) -> Tensor:
    """The initial value of a parameter of an aligner."""
    aligner = config.aligner
    assert aligner is not None
    modality = spec.name.split(".")[1]
    layers = getattr(aligner.encoders[modality], "layers", None) or getattr(
        aligner.encoders[modality], "stages", 1
    )
    return tower_value(spec, seed, int(layers))

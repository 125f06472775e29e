"""The aligner, phase 1 of a multimodal model: features or inputs of several modalities come in,
unit vectors of one width go out. Training brings vectors of equal meaning together.

    media [B, ...] -> tower (an encoder that trains) -> features [B, W]
      -> LayerNorm -> projection without bias -> / length -> [B, D]

Features of frozen encoders come from a table and enter the head as they are. Absent media give the
vector zero and no gradient, whatever the tower makes of the zeros in their place. Names of heads
follow PurrSight's aligner (`loading/aligner_file.py` reads its files, `export/aligner.py` writes
them).

Shapes: B samples, W width of a modality's features, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.data.samples import MEDIA, PRESENT
from headway.model.base import Embeddings, LMHead, Model, ModelOut
from headway.model.encoders.towers import Tower, tower_specs, tower_std
from headway.model.layout import ParamSpec

if TYPE_CHECKING:
    from headway.data.batch import Batch
    from headway.model.config import ModelConfig
    from headway.model.encoders.base import EncoderConfig


class AlignHead(nn.Module):
    """LayerNorm and a projection without bias, to a vector of length 1 in fp32; the zero vector
    stays zero."""

    def __init__(self, width: int, dim: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] -> fp32 [..., D]."""
        projected = self.proj(self.norm(x.to(self.proj.weight.dtype)))
        return F.normalize(projected.float(), dim=-1)


class Aligner(Model):
    """Towers that train, and one head per modality."""

    is_random = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        aligner = config.aligner_settings
        self.names = aligner.modalities
        self.dim = aligner.dim
        self.towers = nn.ModuleDict(
            {name: encoder.tower() for name, encoder in aligner.encoders.items() if encoder.TRAINS}
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
        # Every output has an LM head; this one has no rows and nothing uses it.
        head = LMHead(values, values.new_zeros(0, self.dim), self.chunk_tokens)
        return ModelOut(head, embeddings=Embeddings(self.names, values, present))

    def forward(self, media: Mapping[str, Tensor], present: Tensor) -> Tensor:
        """fp32 [B, modalities, D]."""
        vectors = [self.embed(name, media[name]) for name in self.names]
        return torch.where(present[..., None], torch.stack(vectors, dim=1), 0.0)

    def embed(self, name: str, media: Tensor) -> Tensor:
        """The vectors [n, D] of one modality: inputs of its tower, or features [n, 1, W] of its
        frozen encoder."""
        return self.heads[name](self.features(name, media))

    def features(self, name: str, media: Tensor) -> Tensor:
        """What enters the head of a modality, [n, W]."""
        if name in self.towers:
            return self.towers[name](media)
        return media.flatten(1)

    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers of each tower, then its head."""
        blocks: dict[str, nn.Module] = {}
        for name in self.names:
            if name in self.towers:
                tower = self.towers[name]
                assert isinstance(tower, Tower)
                for path, layer in tower.blocks().items():
                    blocks[f"towers.{name}.{path}"] = layer
            blocks[f"heads.{name}"] = self.heads[name]
        return blocks

    def param_specs(self) -> list[ParamSpec]:
        """As its towers describe them; how far initial values spread depends on the tower's
        depth."""
        encoders = self.config.aligner_settings.encoders
        # Names are towers.MODALITY... and heads.MODALITY...
        specs: list[ParamSpec] = []
        for spec in tower_specs(self):
            modality = spec.name.split(".")[1]
            specs.append(replace(spec, std=tower_std(spec, _depth(encoders[modality]))))
        return specs

    @property
    def head_weight(self) -> Tensor:
        """Empty: there is no vocabulary."""
        return torch.zeros(0, self.dim)

    @property
    def head_parameter(self) -> None:
        """None: there is no LM head."""
        return None


def aligner_specs(config: ModelConfig) -> list[ParamSpec]:
    """Every parameter of an aligner.

    Only built encoders know theirs, so it is built without memory.
    """
    with torch.device("meta"):
        return Aligner(config).param_specs()


def _depth(encoder: EncoderConfig) -> int:
    """How many layers of an encoder add to its stream."""
    layers = getattr(encoder, "layers", None) or getattr(encoder, "stages", 1)
    return int(layers)

"""Features of images and sounds come in, embeddings at their positions in the stream go out.

Shapes: B rows, T tokens, D width of the stream, I items of a modality in a row, P vectors of an
item, W width of a vector, K tokens of an item, S soft tokens of a row: the sum of I * K over
modalities.

    features [B,I,P,W] -> aligner (frozen, optional) -> projector -> [B,I,K,D]
                          an absent item has the missing embedding
    all modalities, one after another: soft [B,S,D]
    slot [B,T]: which soft token of its row stands at a position, -1 for text

Invariant: an item that is not `present` has no influence, whatever its features hold: neither on
the output nor on any gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.media_shape import SHARED, MediaInput, MediaShape

if TYPE_CHECKING:
    from headway.data.batch import Batch

SLOT = "media.slot"
"""The batch column [B,T] of slots; int32."""
ALIGNER_EPS = 1e-6
"""Epsilon of LayerNorm in phase-1 heads: the default of `model.aligner.norm_eps`, with which
they were trained."""


@dataclass(frozen=True)
class MediaTensors:
    """The media of some rows."""

    slot: Tensor
    """int32 [B,T]"""
    features: dict[str, Tensor]
    """By modality: [B,I,P,W]."""
    present: dict[str, Tensor]
    """By modality: bool [B,I]."""

    @classmethod
    def of(cls, batch: Batch, shape: MediaShape | None) -> MediaTensors | None:
        """The media of a batch; None where the model takes none, or the batch has no column for
        it."""
        if shape is None or SLOT not in batch.extra:
            return None
        names = shape.modalities
        return cls(
            batch.extra[SLOT],
            {name: batch.extra[f"media.{name}"] for name in names},
            {name: batch.extra[f"media.{name}.present"] for name in names},
        )

    def rotary(self, position: Tensor) -> Tensor:
        """The positions by which tokens are rotated: their own."""
        return position

    def at(self, begin: int, end: int) -> MediaTensors:
        """The same media for some of the positions."""
        return MediaTensors(self.slot[:, begin:end], self.features, self.present)


def all_tokens(slot: Tensor) -> Tensor:
    """[B,T] unchanged, on a rank that has the stream of every token."""
    return slot


class AlignerHead(nn.Module):
    """The phase-1 projection of one modality: LayerNorm, a linear without bias, L2 norm; a zero
    vector stays zero."""

    def __init__(self, width: int, aligned: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=ALIGNER_EPS)
        self.fc = nn.Linear(width, aligned, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(self.fc(self.norm(features)), dim=-1)


class Projector(nn.Module):
    """Two linears with GELU between them: a pooled vector becomes K embeddings, or each of many
    vectors becomes one."""

    def __init__(self, media_input: MediaInput, shape: MediaShape, hidden_size: int) -> None:
        super().__init__()
        tokens = media_input.tokens if media_input.is_pooled else 1
        self.missing = nn.Parameter(torch.empty(tokens, hidden_size))
        self.up = nn.Linear(shape.aligned or media_input.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, tokens * hidden_size)

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """[B,I,P,W] and [B,I] -> [B,I*K,D]."""
        # K = tokens of the one vector, or one token for each of P vectors.
        rows, items, _, _ = features.shape
        projected = self.down(F.gelu(self.up(features)))
        embeddings = projected.view(rows, items, -1, self.missing.shape[1])
        return torch.where(present[..., None, None], embeddings, self.missing).flatten(1, 2)


class MediaEmbedder(nn.ModuleDict):
    """The projectors of a model, by modality; or one for all of them."""

    def __init__(self, shape: MediaShape, hidden_size: int) -> None:
        if shape.shared:
            inputs = {SHARED: shape.inputs[0]}
        else:
            inputs = {media_input.modality: media_input for media_input in shape.inputs}
        super().__init__(
            {
                name: Projector(media_input, shape, hidden_size)
                for name, media_input in inputs.items()
            }
        )
        self.shape = shape
        self.own_tokens: Callable[[Tensor], Tensor] = all_tokens
        """[B,T] of all tokens -> [B,t] of those whose stream this rank has."""

    def forward(self, x: Tensor, media: MediaTensors, aligner: nn.ModuleDict) -> Tensor:
        """The stream x [B,T,D] with soft tokens at their slots; features pass `aligner` first."""
        # Every modality, whether an item of the batch has it or not: shapes do not depend on data.
        soft = torch.cat(
            [self._soft(name, media, aligner, x.dtype) for name in self.shape.modalities], dim=1
        )
        rows, slots, width = soft.shape

        # [B*t]: the soft token of each position, counted over all rows; -1 for text.
        begin = slots * torch.arange(rows, device=soft.device)[:, None]
        slot = self.own_tokens(torch.where(media.slot >= 0, media.slot + begin, -1)).flatten()
        is_soft = slot >= 0

        # Text positions point at different soft tokens: with one for all of them, the backward
        # would add their zeros to the same row one after another.
        spread = torch.arange(len(slot), device=slot.device) % (rows * slots)
        index = torch.where(is_soft, slot, spread)
        embeddings = soft.flatten(0, 1).gather(0, index[:, None].expand(-1, width)).view(x.shape)
        return torch.where(is_soft.view(x.shape[:2])[..., None], embeddings, x)

    def _soft(
        self, name: str, media: MediaTensors, aligner: nn.ModuleDict, dtype: torch.dtype
    ) -> Tensor:
        """The soft tokens [B,I*K,D] of one modality."""
        present = media.present[name]
        # Zeros instead of what an absent item happens to hold: 0 * inf in a weight's gradient would
        # not be 0.
        features = media.features[name].to(dtype).masked_fill(~present[..., None, None], 0.0)
        aligned = aligner[name](features)
        projector = self[SHARED if self.shape.shared else name]
        return projector(aligned, present)


def build_aligner(shape: MediaShape) -> nn.ModuleDict:
    """The frozen phase-1 projections of a model by modality; without phase 1, features enter the
    projector as they are."""
    if shape.aligned is None:
        return nn.ModuleDict({name: nn.Identity() for name in shape.modalities})
    heads = {
        media_input.modality: AlignerHead(media_input.width, shape.aligned)
        for media_input in shape.inputs
    }
    return nn.ModuleDict(heads)

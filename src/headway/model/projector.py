"""Features of images and sounds come in, embeddings at their positions in the stream go out.

Shapes: B rows, T tokens, D width of the stream, I items of a modality in a row, P vectors of an item, W width of a vector, K tokens of an
item, S soft tokens of a row: the sum of I * K over modalities.

    features [B,I,P,W] -> aligner (frozen, optional) -> projector -> [B,I,K,D], the missing embedding where an item is absent
    all modalities, one after another: soft [B,S,D];  slot [B,T]: which soft token stands at a position, -1 for text

Invariant: what is absent by `present` has no influence, whatever its features hold: neither on the output nor on any gradient.
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
        """The media of a batch; None where the model takes none, or the batch has no column for it."""
        if shape is None or SLOT not in batch.extra:
            return None
        names = shape.modalities
        return cls(
            batch.extra[SLOT],
            {name: batch.extra[f"media.{name}"] for name in names},
            {name: batch.extra[f"media.{name}.present"] for name in names},
        )

    def at(self, begin: int, end: int) -> MediaTensors:
        """The same media for some of the positions."""
        return MediaTensors(self.slot[:, begin:end], self.features, self.present)


def all_tokens(slot: Tensor) -> Tensor:
    """[B,T] unchanged: this rank has the stream of every token."""
    return slot


class AlignerHead(nn.Module):
    """The phase-1 projection of one modality: LayerNorm, a linear without bias, L2 norm; a zero vector stays zero."""

    def __init__(self, width: int, aligned: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=ALIGNER_EPS)
        self.fc = nn.Linear(width, aligned, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(self.fc(self.norm(features)), dim=-1)


class Projector(nn.Module):
    """Two linears with GELU between them: a pooled vector becomes K embeddings, or each of many vectors becomes one."""

    def __init__(self, one: MediaInput, shape: MediaShape, hidden_size: int) -> None:
        super().__init__()
        tokens = one.tokens if one.is_pooled else 1
        self.missing = nn.Parameter(torch.empty(tokens, hidden_size))
        self.up = nn.Linear(shape.aligned or one.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, tokens * hidden_size)

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """[B,I,P,W] and [B,I] -> [B,I*K,D]."""
        rows, items, _, _ = features.shape
        made = self.down(F.gelu(self.up(features))).view(rows, items, -1, self.missing.shape[1])
        return torch.where(present[..., None, None], made, self.missing).flatten(1, 2)


class MediaEmbedder(nn.ModuleDict):
    """The projectors of a model, by modality; or one for all of them."""

    def __init__(self, shape: MediaShape, hidden_size: int) -> None:
        chosen = (
            {SHARED: shape.inputs[0]}
            if shape.shared
            else {one.modality: one for one in shape.inputs}
        )
        super().__init__({name: Projector(one, shape, hidden_size) for name, one in chosen.items()})
        self.shape = shape
        self.own_tokens: Callable[[Tensor], Tensor] = all_tokens
        """[B,T] of all tokens -> [B,t] of those whose stream this rank has."""

    def forward(self, x: Tensor, media: MediaTensors, aligner: nn.ModuleDict | None) -> Tensor:
        """The stream x [B,T,D] with soft tokens at their slots."""
        soft = torch.cat(
            [self._soft(name, media, aligner, x.dtype) for name in self.shape.modalities], dim=1
        )
        rows, slots, width = soft.shape
        begin = slots * torch.arange(rows, device=soft.device)[:, None]
        at = self.own_tokens(torch.where(media.slot >= 0, media.slot + begin, -1)).flatten()
        # Text positions point at different soft tokens: with one for all of them, the backward would add their zeros in a queue.
        index = torch.where(at >= 0, at, torch.arange(len(at), device=at.device) % (rows * slots))
        found = soft.flatten(0, 1).gather(0, index[:, None].expand(-1, width)).view(x.shape)
        return torch.where((at >= 0).view(x.shape[:2])[..., None], found, x)

    def _soft(
        self, name: str, media: MediaTensors, aligner: nn.ModuleDict | None, dtype: torch.dtype
    ) -> Tensor:
        present = media.present[name]
        # Zeros instead of what an absent item happens to hold: 0 * inf in a weight's gradient would not be 0.
        features = media.features[name].to(dtype).masked_fill(~present[..., None, None], 0.0)
        if aligner is not None:
            features = aligner[name](features)
        return self[SHARED if self.shape.shared else name](features, present)


def build_aligner(shape: MediaShape) -> nn.ModuleDict | None:
    """The frozen phase-1 projections of a model; None where features enter as they are."""
    if shape.aligned is None:
        return None
    return nn.ModuleDict(
        {one.modality: AlignerHead(one.width, shape.aligned) for one in shape.inputs}
    )

"""What one prefill piece is made of: tokens of several prompts, packed, and their media."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from headway.errors import ConfigError
from headway.infer.engine.request import EngineRequest
from headway.infer.engine.sequence import EngineSequence
from headway.infer.load import LoadedModel
from headway.model.media_shape import MediaShape
from headway.model.paged_layer import PrefillPiece
from headway.model.projector import MediaTensors

PieceOf = tuple[EngineSequence, PrefillPiece]


def plan_pieces(reading: Sequence[EngineSequence], most: int) -> list[PieceOf]:
    """The next tokens of the oldest prompts, at most `most` of them."""
    found: list[PieceOf] = []
    for one in reading:
        stop = one.target
        if one.computed < one.keep_at < stop:
            stop = one.keep_at  # a snapshot is made there
        count = min(stop - one.computed, most)
        if count == 0:
            break
        found.append((one, PrefillPiece(one.slot, one.computed, count)))
        most -= count
    return found


def check_media(shape: MediaShape | None, request: EngineRequest) -> None:
    """Refuse media that the model cannot read, before they are packed with those of other requests."""
    media = request.media
    assert media is not None
    if shape is None:
        raise ConfigError("the request has media; the model takes text alone.")
    for item in media.items:
        if item.modality not in shape.modalities:
            raise ConfigError(
                f"the request has an item of {item.modality!r}; the model takes {', '.join(shape.modalities)}."
            )
        kind = shape.of(item.modality)
        if not 0 <= item.offset <= len(request.prompt) - kind.tokens:
            raise ConfigError(
                f"an item of {item.modality!r} stands at token {item.offset} and takes {kind.tokens}; the prompt has {len(request.prompt)}."
            )
        features = None
        if item.content_hash is not None:
            features = media.features.get(item.content_hash)
        if features is None:
            continue
        expected = (kind.vectors, kind.width)
        if tuple(features.shape) != expected or features.dtype.kind not in "fiu":
            raise ConfigError(
                f"features of {item.modality!r} are {features.dtype} of shape {tuple(features.shape)}; "
                f"the model takes numbers of shape {expected}."
            )
        if not np.isfinite(features).all():
            raise ConfigError(f"features of {item.modality!r} hold numbers that are not finite.")


def packed_media(loaded: LoadedModel, work: Sequence[PieceOf]) -> MediaTensors | None:
    """The media of packed pieces as those of one row; None where no piece has any."""
    shape = loaded.config.media
    if shape is None or all(one.request.media is None for one, _ in work):
        return None
    slot = torch.full((1, sum(piece.count for _, piece in work)), -1, dtype=torch.int32)
    features: dict[str, torch.Tensor] = {}
    present: dict[str, torch.Tensor] = {}
    first = 0
    for kind in shape.inputs:
        begin, rows, known = 0, list[torch.Tensor](), list[bool]()
        for one, piece in work:
            media = one.request.media
            for item in () if media is None else media.items:
                low, high = max(item.offset, piece.start), min(item.offset + kind.tokens, piece.end)
                if item.modality != kind.modality or low >= high:
                    continue
                soft = (
                    first
                    + len(rows) * kind.tokens
                    + torch.arange(low - item.offset, high - item.offset, dtype=torch.int32)
                )
                slot[0, begin + low - piece.start : begin + high - piece.start] = soft
                found = (
                    None
                    if media is None or item.content_hash is None
                    else media.features.get(item.content_hash)
                )
                rows.append(
                    torch.zeros(kind.vectors, kind.width)
                    if found is None
                    else torch.from_numpy(found).float()
                )
                known.append(found is not None)
            begin += piece.count
        if not rows:
            rows, known = [torch.zeros(kind.vectors, kind.width)], [False]
        features[kind.modality] = torch.stack(rows)[None].to(loaded.device)
        present[kind.modality] = torch.tensor([known], device=loaded.device)
        first += len(rows) * kind.tokens
    return MediaTensors(slot.to(loaded.device), features, present)

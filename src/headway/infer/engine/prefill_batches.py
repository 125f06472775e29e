"""What one prefill call computes: pieces of several prompts, packed into one row, and their
media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from headway.errors import ConfigError
from headway.infer.engine.request import EngineRequest, PromptMedia
from headway.infer.engine.sequence import EngineSequence
from headway.infer.load import LoadedModel
from headway.media.patches import rotary_positions
from headway.model.config import ModelConfig
from headway.model.paged_layer import PrefillPiece
from headway.model.projector import MediaTensors

if TYPE_CHECKING:
    from headway.model.vision import PictureTensors

PieceOf = tuple[EngineSequence, PrefillPiece]


def plan_pieces(reading: Sequence[EngineSequence], most: int) -> list[PieceOf]:
    """The next tokens of the oldest prompts, at most `most` tokens together."""
    work: list[PieceOf] = []
    room = most
    for sequence in reading:
        # A piece ends where a snapshot is made.
        places = [*sequence.keep_at, sequence.target]
        stop = min(place for place in places if place > sequence.computed)
        count = min(stop - sequence.computed, room)
        if count == 0:
            break  # no room is left: a sequence that is being read has tokens to compute
        work.append((sequence, PrefillPiece(sequence.slot, sequence.computed, count)))
        room -= count
    return work


def check_media(config: ModelConfig, request: EngineRequest) -> None:
    """Refuse media that the model cannot read, before they are packed with those of other
    requests."""
    media = request.media
    assert media is not None
    if config.vision is not None:
        width = config.vision.feature_size(config.hidden_size)
        _check_pictures(media, len(request.prompt), width)
        return
    shape = config.media
    if shape is None:
        raise ConfigError("the request has media; the model takes text alone.")
    for item in media.items:
        if item.modality not in shape.modalities:
            raise ConfigError(
                f"the request has an item of {item.modality!r}; the model takes "
                f"{', '.join(shape.modalities)}."
            )
        kind = shape.of(item.modality)
        if not 0 <= item.offset <= len(request.prompt) - kind.tokens:
            raise ConfigError(
                f"an item of {item.modality!r} stands at token {item.offset} and takes "
                f"{kind.tokens}; the prompt has {len(request.prompt)}."
            )
        features = None
        if item.content_hash is not None:
            features = media.features.get(item.content_hash)
        if features is None:
            continue
        expected = (kind.vectors, kind.width)
        if tuple(features.shape) != expected or features.dtype.kind not in "fiu":
            raise ConfigError(
                f"features of {item.modality!r} are {features.dtype} of shape "
                f"{tuple(features.shape)}; "
                f"the model takes numbers of shape {expected}."
            )
        if not np.isfinite(features).all():
            raise ConfigError(f"features of {item.modality!r} hold numbers that are not finite.")


def _check_pictures(media: PromptMedia, length: int, width: int) -> None:
    """The same for a model with its own vision tower."""
    end = 0
    for item in media.items:
        name = item.content_hash
        is_read = name is not None and name in media.grids and name in media.features
        if item.modality != "image" or name is None or not is_read:
            raise ConfigError(
                f"the request has an item of {item.modality!r} without its features; the model "
                "takes pictures that its tower has read."
            )
        rows, columns = media.grids[name]
        if not end <= item.offset <= length - rows * columns:
            raise ConfigError(
                f"a picture stands at token {item.offset} and takes {rows * columns}; the prompt "
                f"has {length}, and the picture before ends at {end}."
            )
        end = item.offset + rows * columns
        features = media.features[name]
        if features.shape != (rows * columns, width) or features.dtype.kind != "f":
            raise ConfigError(
                f"features of a picture are {features.dtype} of shape {tuple(features.shape)}; "
                f"the model takes floats of shape {(rows * columns, width)}."
            )
        if not np.isfinite(features).all():
            raise ConfigError("features of a picture hold numbers that are not finite.")


def rotary_shifts(work: Sequence[PieceOf]) -> list[int]:
    """How far rotation is behind the number of a token, after the pictures of each prompt."""
    shifts: list[int] = []
    for sequence, _ in work:
        media = sequence.request.media
        shifts.append(0 if media is None else media.rotary_shift())
    return shifts


def _packed_pictures(loaded: LoadedModel, work: Sequence[PieceOf]) -> PictureTensors | None:
    """The pictures of packed pieces as those of one row; None where no prompt has any."""
    from headway.model.vision import PictureTensors

    if all(sequence.request.media is None for sequence, _ in work):
        return None
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    features: list[np.ndarray] = []
    num_cells = 0
    for sequence, piece in work:
        media = sequence.request.media
        pictures = [] if media is None else media.pictures()
        positions.append(rotary_positions(piece.end, pictures)[piece.start :])
        slot = np.full(piece.count, -1, np.int64)
        for item in () if media is None else media.items:
            assert media is not None and item.content_hash is not None, "checked at submit"
            vectors = media.features[item.content_hash]
            # Of the picture's positions, those that this piece of the prompt covers.
            low = max(item.offset, piece.start)
            high = min(item.offset + len(vectors), piece.end)
            if low >= high:
                continue
            cells = np.arange(low - item.offset, high - item.offset)
            slot[low - piece.start : high - piece.start] = num_cells + cells
            features.append(vectors)
            num_cells += len(vectors)
        slots.append(slot)

    position = torch.from_numpy(np.concatenate(positions))[None].to(loaded.device)
    if not features:
        return PictureTensors(position)
    return PictureTensors(
        position,
        torch.from_numpy(np.concatenate(slots))[None].to(loaded.device),
        features=torch.from_numpy(np.concatenate(features)).to(loaded.device),
    )


def packed_media(
    loaded: LoadedModel, work: Sequence[PieceOf]
) -> MediaTensors | PictureTensors | None:
    """The media of packed pieces as those of one row; None where no piece has any."""
    if loaded.config.vision is not None:
        return _packed_pictures(loaded, work)
    shape = loaded.config.media
    if shape is None or all(sequence.request.media is None for sequence, _ in work):
        return None
    # [1, tokens of the row]: which soft token is at a position, -1 for text. Not a slot of the
    # engine.
    soft_token_slot = torch.full((1, sum(piece.count for _, piece in work)), -1, dtype=torch.int32)
    features: dict[str, torch.Tensor] = {}
    present: dict[str, torch.Tensor] = {}
    # Soft tokens are numbered over all modalities, in the order of the model's inputs.
    first_soft_token = 0
    for kind in shape.inputs:
        rows = list[torch.Tensor]()
        is_present = list[bool]()
        piece_begin = 0
        for sequence, piece in work:
            media = sequence.request.media
            items = () if media is None else media.items
            for item in items:
                # of the item's positions, those that this piece of the prompt covers
                low = max(item.offset, piece.start)
                high = min(item.offset + kind.tokens, piece.end)
                if item.modality != kind.modality or low >= high:
                    continue
                positions = torch.arange(low - item.offset, high - item.offset, dtype=torch.int32)
                soft_tokens = first_soft_token + len(rows) * kind.tokens + positions
                # from positions of the prompt to positions of the row
                row_begin = piece_begin - piece.start
                soft_token_slot[0, row_begin + low : row_begin + high] = soft_tokens

                vectors = None
                if media is not None and item.content_hash is not None:
                    vectors = media.features.get(item.content_hash)
                if vectors is None:
                    # An absent picture still fills its slots, so that shapes are those of the plan.
                    rows.append(torch.zeros(kind.vectors, kind.width))
                else:
                    rows.append(torch.from_numpy(vectors).float())
                is_present.append(vectors is not None)
            piece_begin += piece.count
        if not rows:
            # the model wants a tensor of every modality
            rows = [torch.zeros(kind.vectors, kind.width)]
            is_present = [False]
        features[kind.modality] = torch.stack(rows)[None].to(loaded.device)
        present[kind.modality] = torch.tensor([is_present], device=loaded.device)
        first_soft_token += len(rows) * kind.tokens
    return MediaTensors(soft_token_slot.to(loaded.device), features, present)

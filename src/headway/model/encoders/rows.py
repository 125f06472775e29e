"""What makes the rows of an aligner's tables: a modality's settings come in, a frozen encoder or
the reader of a tower's inputs goes out."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from headway.model.aligner_config import AlignerConfig
from headway.prepare.features import EncoderRows, InputRows, RowMaker

if TYPE_CHECKING:
    import torch

    from headway.model.encoders.base import EncoderConfig, FrozenMediaEncoder


# By its settings as text: two configs with the same settings share one loaded encoder.
@lru_cache(maxsize=8)
def _built(kind: type[EncoderConfig], settings: str, modality: str) -> FrozenMediaEncoder:
    return kind.model_validate_json(settings).build(modality)


def frozen_encoder(config: EncoderConfig, modality: str) -> FrozenMediaEncoder:
    """The frozen encoder of a config, loaded once."""
    return _built(type(config), config.model_dump_json(), modality)


def row_makers(aligner: AlignerConfig, device: torch.device | None = None) -> list[RowMaker]:
    """What makes the rows of each modality's table."""
    makers: list[RowMaker] = []
    for modality, config in aligner.encoders.items():
        if config.TRAINS:
            makers.append(InputRows(modality, config.input_of(modality)))
            continue
        encoder = frozen_encoder(config, modality)
        if device is not None:
            encoder.to(device)
        makers.append(EncoderRows(encoder))
    return makers

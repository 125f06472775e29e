"""The `model.aligner` section: which encoders are aligned, and in what width. Imports without
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import field_validator, model_validator

from headway.config.kinds import KindIn
from headway.config.section import Section, setting
from headway.model.encoders.base import MODALITIES, EncoderConfig

OneEncoder = Annotated[EncoderConfig, KindIn("headway.model.encoders")]
SOURCES = "Encoder of each modality (text, image, audio), at least two; null leaves a modality out."


class AlignerConfig(Section):
    """Encoders of two or three modalities, and the heads that project them into one space."""

    encoders: dict[str, OneEncoder] = setting(..., SOURCES)
    dim: int = setting(512, "Width of the common space.", gt=0, le=65536)
    norm_eps: float = setting(1e-6, "Added to the variance in the heads' LayerNorm.", gt=0)
    weights: Path | None = setting(
        None,
        "aligner.safetensors or PurrSight's aligner.pt whose heads and scales the run starts "
        "from; null = random heads.",
    )
    widths: dict[str, int] = setting(
        dict,
        "Widths of the frozen encoders' features. Left out, they are read from the encoders; "
        "others are refused.",
    )

    @field_validator("encoders", mode="before")
    @classmethod
    def _in_order(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        unknown = [name for name in value if name not in MODALITIES]
        if unknown:
            raise ValueError(f"has {unknown[0]!r}; modalities are {', '.join(MODALITIES)}")
        # null leaves a modality of the recipe out: model.aligner.encoders.audio=null.
        # The order of modalities is that of vectors and columns, so it must not depend on the
        # recipe.
        return {name: value[name] for name in MODALITIES if value.get(name) is not None}

    @model_validator(mode="after")
    def _fits(self) -> AlignerConfig:
        if len(self.encoders) < 2:
            raise ValueError(
                f"has encoders for {', '.join(self.encoders) or 'nothing'}; an aligner needs two "
                "modalities or more"
            )
        for name, encoder in self.encoders.items():
            if name not in encoder.FOR:
                raise ValueError(
                    f"has kind {encoder.kind!r} for {name}; it encodes {', '.join(encoder.FOR)}"
                )
        return self

    @property
    def modalities(self) -> tuple[str, ...]:
        """In the order of MODALITIES."""
        return tuple(self.encoders)

    def width_of(self, modality: str) -> int:
        """Width of what enters a modality's head."""
        encoder = self.encoders[modality]
        if encoder.TRAINS:
            return encoder.tower_width
        return self.widths[modality]

"""A small transformer over the bytes of a text, trained from scratch with the aligner: no
tokenizer is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import model_validator

from headway.config.section import setting
from headway.model.encoders.base import EncoderConfig
from headway.prepare.media_inputs import ByteInput

if TYPE_CHECKING:
    from headway.model.encoders.towers import Tower


class Config(EncoderConfig):
    """A text transformer of our own."""

    FOR: ClassVar[tuple[str, ...]] = ("text",)
    TRAINS: ClassVar[bool] = True
    kind: str = setting("text_bytes", "text_bytes.", on_resume="fixed")
    max_bytes: int = setting(
        96, "Bytes of UTF-8 that are read; the rest of a text is ignored.", gt=0, le=8192
    )
    width: int = setting(128, "Width of the stream.", gt=0)
    layers: int = setting(2, "Number of layers.", gt=0, le=1000)
    heads: int = setting(4, "Attention heads.", gt=0)

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.width % self.heads:
            raise ValueError(f"has heads={self.heads}; it must divide width={self.width}")
        return self

    def input_of(self, modality: str) -> ByteInput:
        """Bytes, int32 [max_bytes], -1 after the end."""
        return ByteInput(self.max_bytes)

    @property
    def tower_width(self) -> int:
        return self.width

    def tower(self) -> Tower:
        """The module."""
        from headway.model.encoders.towers import TextTower

        return TextTower(self.max_bytes, self.width, self.layers, self.heads)

"""A small vision transformer, trained from scratch with the aligner. In: pixels; out: the mean
of its patch vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from headway.config.section import setting
from headway.media.items import ImageSpec
from headway.model.encoders.base import EncoderConfig
from headway.prepare.media_inputs import ImageInput

if TYPE_CHECKING:
    from headway.model.encoders.towers import Tower


class Config(EncoderConfig):
    """A vision transformer of our own."""

    FOR: ClassVar[tuple[str, ...]] = ("image",)
    TRAINS: ClassVar[bool] = True
    kind: str = setting("vit", "vit.", on_resume="fixed")
    image_size: int = setting(64, "Pixels of a side, after resizing and cropping.", ge=8, le=1024)
    patch: int = setting(8, "Pixels of a patch's side.", gt=0)
    width: int = setting(128, "Width of the stream.", gt=0)
    layers: int = setting(4, "Number of layers.", gt=0, le=1000)
    heads: int = setting(4, "Attention heads.", gt=0)
    stem: Literal["patches", "convolutions"] = setting(
        "patches",
        "What makes a vector of each patch: one linear layer, or overlapping convolutions, which "
        "tell small shapes apart sooner.",
        on_resume="fixed",
    )

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.image_size % self.patch:
            raise ValueError(f"has patch={self.patch}; it must divide image_size={self.image_size}")
        # Each convolution halves the picture, down to one place per patch.
        if self.stem == "convolutions" and (self.patch < 2 or self.patch & (self.patch - 1)):
            raise ValueError(
                f"has patch={self.patch}; with stem: convolutions it must be a power of two: each "
                "one halves the picture"
            )
        if self.width % self.heads:
            raise ValueError(f"has heads={self.heads}; it must divide width={self.width}")
        return self

    def input_of(self, modality: str) -> ImageInput:
        """Pixels, uint8 [3, image_size, image_size]."""
        return ImageInput(ImageSpec(size=self.image_size, resize=self.image_size))

    @property
    def tower_width(self) -> int:
        return self.width

    def tower(self) -> Tower:
        """The module."""
        from headway.model.encoders.towers import ConvStem, PatchStem, VisionTower

        if self.stem == "convolutions":
            stem = ConvStem(self.patch, self.width)
        else:
            stem = PatchStem(self.patch, self.width)
        return VisionTower(self.image_size, stem, self.patch, self.width, self.layers, self.heads)

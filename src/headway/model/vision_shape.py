"""The vision tower of a published model, as data: which class it is, how it reads pictures, and how
its cells stand among the tokens of the language model. Imports without torch.

    <|vision_start|> <|image_pad|> x rows * columns <|vision_end|>
         begin_id           pad_id                      end_id

The shape is a field of `ModelConfig`, so a checkpoint says by itself that the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.media.patches import PictureSpec
    from headway.records.encode_media import NativePositions

TOWER = "visual."
"""Starts the names of the tower's parameters."""
KINDS = ("qwen2_5_vl",)
"""Types of config.json whose towers are read."""


@dataclass(frozen=True)
class VisionShape:
    """A vision tower and its place in a language model."""

    kind: str
    """The `model_type` of the whole model."""
    tower: Mapping[str, Any]
    """The `vision_config` of config.json."""
    picture: Mapping[str, Any]
    """How a picture becomes patches: the values of a `PictureSpec`."""
    begin_id: int
    pad_id: int
    end_id: int
    sections: tuple[int, ...]
    """How many planes of a rotated head turn by time, by row and by column."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> VisionShape:
        """A shape from plain values."""
        return cls(**{**values, "sections": tuple(values["sections"])})

    @property
    def spec(self) -> PictureSpec:
        """How a picture becomes patches."""
        # Imported here: a run of text alone loads no module of media.
        from headway.media.patches import PictureSpec

        return PictureSpec.parse(self.picture)

    def with_spec(self, spec: PictureSpec) -> VisionShape:
        """The same tower, which is given other pictures."""
        return replace(self, picture=plain_spec(spec))

    @property
    def positions(self) -> NativePositions:
        """How pictures stand in documents."""
        from headway.records.encode_media import NativePositions

        return NativePositions(
            {"image": 0},
            missing=False,
            picture=self.spec,
            begin_id=self.begin_id,
            pad_id=self.pad_id,
            end_id=self.end_id,
        )

    def problem(self, planes: int, hidden_size: int, vocab_size: int | None) -> str | None:
        """Why a language model cannot have this tower; None if it can."""
        if self.kind not in KINDS:
            return f"the tower is of {self.kind!r}; headway has {', '.join(KINDS)}"
        if len(self.sections) != 3 or sum(self.sections) != planes:
            return (
                f"mrope_section is {list(self.sections)}; it must have three numbers whose sum "
                f"is {planes}, half of a head"
            )
        width = self.tower.get("out_hidden_size")
        if width != hidden_size:
            return f"the tower gives vectors of {width} numbers; the model takes {hidden_size}"
        spec = self.spec
        sizes = {
            "patch_size": spec.patch,
            "spatial_merge_size": spec.merge,
            "temporal_patch_size": spec.frames,
            "in_channels": 3,
        }
        for name, value in sizes.items():
            if self.tower.get(name) != value:
                return (
                    f"the tower has {name}={self.tower.get(name)} and the processor {value}; they "
                    "must be of one model"
                )
        ids = (self.begin_id, self.pad_id, self.end_id)
        if vocab_size is not None and max(ids) >= vocab_size:
            return f"tokens of pictures are {list(ids)}; the vocabulary has {vocab_size}"
        return spec.problem()


def plain_spec(spec: PictureSpec) -> dict[str, Any]:
    """The values of a spec as JSON has them."""
    return {**asdict(spec), "mean": list(spec.mean), "std": list(spec.std)}

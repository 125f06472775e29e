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
POSITION_TABLE = "pos_embed."
"""Starts the names of a tower's learned positions, behind `TOWER`."""


@dataclass(frozen=True)
class VisionKind:
    """What one type of config.json fixes besides its settings."""

    module: str
    """Of transformers, below `transformers.models`."""
    config_class: str
    tower_class: str
    sections: tuple[int, ...]
    """Planes by time, row and column, where config.json does not say."""
    mixes_planes: bool = False
    """Planes by time, row and column take turns; otherwise they stand one kind after another."""
    has_deepstack: bool = False
    """Features of inner layers of the tower are added behind the first layers of the decoder."""


KINDS: Mapping[str, VisionKind] = {
    "qwen2_5_vl": VisionKind(
        "qwen2_5_vl",
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
        sections=(16, 24, 24),
    ),
    "qwen3_vl": VisionKind(
        "qwen3_vl",
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionModel",
        sections=(24, 20, 20),
        mixes_planes=True,
        has_deepstack=True,
    ),
    "qwen3_vl_moe": VisionKind(
        "qwen3_vl_moe",
        "Qwen3VLMoeVisionConfig",
        "Qwen3VLMoeVisionModel",
        sections=(24, 20, 20),
        mixes_planes=True,
        has_deepstack=True,
    ),
}
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

    @property
    def deepstack_layers(self) -> int:
        """How many layers of the decoder take features of the tower's inner layers."""
        if not KINDS[self.kind].has_deepstack:
            return 0
        return len(self.tower["deepstack_visual_indexes"])

    def feature_size(self, hidden_size: int) -> int:
        """Numbers that the tower gives for a cell: its embedding, then what layers add to it."""
        return (1 + self.deepstack_layers) * hidden_size

    def window_patches(self, layer: int) -> int | None:
        """The most patches that a patch sees in a layer of the tower; None: all of its picture."""
        full = self.tower.get("fullatt_block_indexes")
        if full is None or layer in full:
            return None
        # A window is whole cells.
        cells = max(1, self.tower["window_size"] // self.spec.side)
        return (cells * self.spec.merge) ** 2

    def plane_axes(self) -> list[int]:
        """By which of time (0), row (1) and column (2) each plane of a head turns."""
        planes = sum(self.sections)
        if not KINDS[self.kind].mixes_planes:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        # t, r, c, t, r, c, ... as long as rows and columns have planes left, then time alone.
        axes: list[int] = []
        for plane in range(planes):
            axis = plane % 3
            is_left = plane < 3 * self.sections[axis]
            axes.append(axis if is_left else 0)
        return axes

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

    def problem(
        self, planes: int, hidden_size: int, vocab_size: int | None, num_layers: int
    ) -> str | None:
        """Why a language model cannot have this tower; None if it can.

        `planes`: those of one rotated head.
        """
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
        if problem := self._deepstack_problem(num_layers):
            return problem
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

    def _deepstack_problem(self, num_layers: int) -> str | None:
        if not KINDS[self.kind].has_deepstack:
            return None
        inner = self.tower.get("deepstack_visual_indexes")
        depth = self.tower.get("depth")
        if not isinstance(inner, list | tuple) or not isinstance(depth, int):
            return "the tower does not say deepstack_visual_indexes and depth"
        is_known = all(isinstance(layer, int) and 0 <= layer < depth for layer in inner)
        if not is_known or len(set(inner)) < len(inner) or len(inner) > num_layers:
            return (
                f"deepstack_visual_indexes is {list(inner)}; it must name different layers of the "
                f"tower, 0 to {depth - 1}, and not more than the decoder has ({num_layers})"
            )
        return None


def plain_spec(spec: PictureSpec) -> dict[str, Any]:
    """The values of a spec as JSON has them."""
    return {**asdict(spec), "mean": list(spec.mean), "std": list(spec.std)}

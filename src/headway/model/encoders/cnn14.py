"""CNN14 of PANNs with AudioSet weights, which PurrSight hears with. In: a log-mel of 64 x 256;
out: 2048 numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from headway.config.section import setting
from headway.errors import ConfigError
from headway.media.items import AudioSpec
from headway.media.purrsight import FRAMES
from headway.model.encoders.base import EncoderConfig
from headway.prepare.media_inputs import MelInput, PurrSightMelInput

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder


class Config(EncoderConfig):
    """CNN14 of PANNs at 16 kHz, frozen."""

    FOR: ClassVar[tuple[str, ...]] = ("audio",)
    kind: str = setting("cnn14", "cnn14.", on_resume="fixed")
    path: str = setting(
        ..., "The file of the weights for 16 kHz, Cnn14_16k_mAP=0.438.pth.", min_length=1
    )
    frames: int = setting(256, "Frames of 10 ms of the log-mel.", ge=32, le=4096)

    preprocessing: Literal["standard", "purrsight"] = setting(
        "standard",
        "standard: log-mel and pooling of PANNs. purrsight: as PurrSight computes both (64 x 256 "
        "log-mel of magnitudes, mean over places, "
        "no ReLU), chosen by itself for an aligner.pt of PurrSight.",
    )

    def build(self, modality: str) -> FrozenMediaEncoder:
        from headway.model.encoders.cnn14_module import load_cnn14, mel_filters_of
        from headway.model.encoders.frozen import FrozenModule, files_identity

        path = Path(self.path)
        key = "the path of encoder cnn14"
        if self.preprocessing == "purrsight":
            if self.frames != FRAMES:
                raise ConfigError(
                    f"frames is {self.frames}; PurrSight's log-mel has {FRAMES}. Leave it out, or "
                    "set preprocessing: standard."
                )
            module = load_cnn14(path, key, is_purrsight=True)
            inputs = PurrSightMelInput(mel_filters_of(path, key))
            identity = f"cnn14 {files_identity([path])} preprocessing=purrsight"
            return FrozenModule(modality, module, inputs, identity)
        module = load_cnn14(path, key)
        inputs = MelInput(AudioSpec(frames=self.frames))
        return FrozenModule(modality, module, inputs, f"cnn14 {files_identity([path])}")

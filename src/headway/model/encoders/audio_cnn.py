"""A small convolutional network over log-mels, trained from scratch with the aligner. In: dB [mels,
frames]; out: the mean over places.

It has group norms instead of batch norms: the vector of a sound does not depend on the other sounds
of its microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from headway.config.section import setting
from headway.media.items import AudioSpec
from headway.model.encoders.base import EncoderConfig
from headway.prepare.media_inputs import MelInput

if TYPE_CHECKING:
    from headway.model.encoders.towers import Tower


class Config(EncoderConfig):
    """A convolutional network of our own."""

    FOR: ClassVar[tuple[str, ...]] = ("audio",)
    TRAINS: ClassVar[bool] = True
    kind: str = setting("audio_cnn", "audio_cnn.", on_resume="fixed")
    frames: int = setting(256, "Frames of 10 ms of the log-mel.", ge=8, le=4096)
    width: int = setting(
        128,
        "Channels of the last stage; the stages before it have half as many each.",
        ge=32,
        multiple_of=32,
    )
    stages: int = setting(
        3,
        "Stages; each halves mels and frames, after the first convolution has halved them.",
        ge=1,
        le=5,
    )

    def input_of(self, modality: str) -> MelInput:
        """Log-mel, float32 [64, frames]."""
        return MelInput(AudioSpec(frames=self.frames))

    @property
    def tower_width(self) -> int:
        return self.width

    def tower(self) -> Tower:
        """The module."""
        from headway.model.encoders.towers import AudioTower

        return AudioTower(self.width, self.stages)

"""What the generated multimodal set holds: what `media/synthetic.py` takes, and the options of
`headway data synthetic-media`.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config.options import option
from headway.errors import ConfigError


@dataclass(frozen=True)
class SyntheticMedia:
    """What is generated. A share `missing` of the samples has only a picture, an equal share only a
    sound."""

    samples: int = option(600, "Scenes for training; every question about one is a conversation.")
    heldout: int = option(120, "Scenes with combinations that training never shows.")
    seed: int = option(0, "Chooses the scenes; the same seed gives the same bytes.", min=0)
    image_size: int = option(64, "Width and height of a picture.")
    sample_rate: int = 16_000
    seconds: float = 0.64
    missing: float = option(
        0.1,
        "Share of the scenes with a picture alone, and share with a sound alone. With --no-sounds "
        "all have a picture alone.",
    )
    sounds: bool = option(True, "Write sounds, and ask about them.")

    def __post_init__(self) -> None:
        if self.samples < 1 or self.heldout < 0:
            raise ConfigError(
                f"samples is {self.samples} and heldout {self.heldout}; at least 1 and 0 are "
                "expected."
            )
        if not 16 <= self.image_size <= 1024:
            raise ConfigError(f"image_size is {self.image_size}; it must be 16 to 1024.")
        if not 0.1 <= self.seconds <= 60 or not 8000 <= self.sample_rate <= 48_000:
            raise ConfigError(
                f"seconds is {self.seconds:g} and sample_rate {self.sample_rate}; 0.1 to 60 and "
                "8000 to 48000 are expected."
            )
        if not 0 <= self.missing <= 0.5:
            raise ConfigError(f"missing is {self.missing:g}; it must be 0 to 0.5.")

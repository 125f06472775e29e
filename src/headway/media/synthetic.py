"""The generated multimodal set: a coloured shape at a place in a picture, and a tone. In: a spec and a seed; out: PNG, WAV and JSONL files.

    OUT/images/000000.png   OUT/sounds/000000.wav
    OUT/captions.jsonl            {"text": "a red circle on the left with a low tone", "image": "images/000000.png", "audio": "sounds/..."}
    OUT/captions_heldout.jsonl    the same for combinations of shape, colour, place and tone that captions.jsonl never shows
    OUT/chat.jsonl                {"messages": [{"role": "user", "content": "<image>\\n<audio>\\nWhat colour is the shape?"}, ...],
                                   "images": [...], "audios": [...]}
    OUT/chat_heldout.jsonl

A caption names what is present and nothing else; so do questions. Size, place, brightness, pitch and loudness vary, and pixels and samples
carry noise, so that no two files are equal. Invariant: the same spec gives the same bytes; needs numpy alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import ConfigError
from headway.media.png import write_png
from headway.media.sound import write_wave
from headway.runtime.storage import write_atomic, writing

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (235, 215, 50),
    "purple": (160, 60, 190), "white": (240, 240, 240),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross", "ring")
PLACES = {"in the centre": (0.5, 0.5), "on the left": (0.25, 0.5), "on the right": (0.75, 0.5), "at the top": (0.5, 0.25),
          "at the bottom": (0.5, 0.75)}  # fmt: skip
TONES = {
    "low": (250.0, 250.0),
    "middle": (700.0, 700.0),
    "high": (2000.0, 2000.0),
    "rising": (350.0, 1600.0),
    "falling": (1600.0, 350.0),
}
"""Name -> the frequency at the start and at the end."""
HELD_OUT = 0.2
"""This share of the combinations of shape, colour, place and tone is held out, chosen at random: few enough that no value, and no two
values, rule out another."""


@dataclass(frozen=True)
class SyntheticMedia:
    """What is generated. A share `missing` of the samples has only a picture, an equal share only a sound."""

    samples: int = 600
    heldout: int = 120
    seed: int = 0
    image_size: int = 64
    sample_rate: int = 16_000
    seconds: float = 0.64
    missing: float = 0.1

    def __post_init__(self) -> None:
        if self.samples < 1 or self.heldout < 0:
            raise ConfigError(
                f"samples is {self.samples} and heldout {self.heldout}; at least 1 and 0 are expected."
            )
        if not 16 <= self.image_size <= 1024:
            raise ConfigError(f"image_size is {self.image_size}; it must be 16 to 1024.")
        if not 0.1 <= self.seconds <= 60 or not 8000 <= self.sample_rate <= 48_000:
            raise ConfigError(
                f"seconds is {self.seconds:g} and sample_rate {self.sample_rate}; 0.1 to 60 and 8000 to 48000 are expected."
            )
        if not 0 <= self.missing <= 0.5:
            raise ConfigError(f"missing is {self.missing:g}; it must be 0 to 0.5.")


@dataclass(frozen=True)
class Scene:
    """One sample: its properties and what is present."""

    index: int
    shape: str
    colour: str
    place: str
    tone: str
    has_image: bool = True
    has_audio: bool = True

    @property
    def caption(self) -> str:
        """A sentence about what is present."""
        seen = f"a {self.colour} {self.shape} {self.place}"
        heard = f"a {self.tone} tone"
        return (
            seen if not self.has_audio else heard if not self.has_image else f"{seen} with {heard}"
        )

    @property
    def questions(self) -> list[tuple[str, str]]:
        """Questions and answers about what is present."""
        seen = [
            ("What colour is the shape?", self.colour),
            ("What shape is it?", self.shape),
            ("Where is the shape?", self.place),
        ]
        return (seen if self.has_image else []) + (
            [("What kind of tone is it?", self.tone)] if self.has_audio else []
        )

    @property
    def media(self) -> dict[str, str]:
        """Modality -> the file, relative to the folder."""
        found = {"image": f"images/{self.index:06d}.png"} if self.has_image else {}
        return found | ({"audio": f"sounds/{self.index:06d}.wav"} if self.has_audio else {})


ANSWERS = {
    "What colour is the shape?": tuple(COLOURS), "What shape is it?": SHAPES, "Where is the shape?": tuple(PLACES),
    "What kind of tone is it?": tuple(TONES),
}  # fmt: skip
"""Question -> every answer; chance is one over their number."""


def scenes(spec: SyntheticMedia) -> tuple[list[Scene], list[Scene]]:
    """The training scenes, and the scenes of held-out combinations. All samples of both are shuffled by the seed alone."""
    rng = np.random.Generator(np.random.PCG64([spec.seed, 1]))
    shown, held_out = _combinations()
    train = [_scene(i, shown, spec.missing, rng) for i in range(spec.samples)]
    return train, [_scene(spec.samples + i, held_out, 0.0, rng) for i in range(spec.heldout)]


def _combinations() -> tuple[list[tuple[str, str, str, str]], list[tuple[str, str, str, str]]]:
    """Those of training and those held out, the same for every seed."""
    every = list(product(SHAPES, COLOURS, PLACES, TONES))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(every))
    held_out = set(order[: round(HELD_OUT * len(every))].tolist())
    return [one for n, one in enumerate(every) if n not in held_out], [
        one for n, one in enumerate(every) if n in held_out
    ]


def _scene(
    index: int,
    combinations: list[tuple[str, str, str, str]],
    missing: float,
    rng: np.random.Generator,
) -> Scene:
    shape, colour, place, tone = combinations[int(rng.random() * len(combinations))]
    draw = rng.random()
    return Scene(
        index, shape, colour, place, tone, has_image=draw >= missing, has_audio=draw < 1 - missing
    )


def draw_image(scene: Scene, spec: SyntheticMedia) -> NDArray[np.uint8]:
    """The picture of a scene, `[size, size, 3]`."""
    rng = np.random.Generator(np.random.PCG64([spec.seed, 2, scene.index]))
    size = spec.image_size
    x, y = PLACES[scene.place]
    x, y = x + 0.06 * (rng.random() - 0.5), y + 0.06 * (rng.random() - 0.5)
    radius = 0.13 + 0.06 * rng.random()
    light = 0.85 + 0.15 * rng.random()
    behind = 20 + 40 * rng.random()
    at = (np.arange(size) + 0.5) / size
    inside = _inside(scene.shape, (at[None, :] - x) / radius, (at[:, None] - y) / radius)
    pixels = np.where(inside[:, :, None], np.array(COLOURS[scene.colour]) * light, behind)
    noise = rng.integers(-8, 9, (size, size, 3))
    return np.clip(np.floor(pixels) + noise, 0, 255).astype(np.uint8)


def _inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    square = np.maximum(abs(x), abs(y))
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "ring":
        return (x**2 + y**2 <= 1) & (x**2 + y**2 >= 0.3)
    if shape == "square":
        return square <= 0.9
    if shape == "triangle":
        return (y <= 0.8) & (abs(x) <= (y + 1) / 1.8)
    return (square <= 1) & (np.minimum(abs(x), abs(y)) <= 0.3)  # cross


def draw_sound(scene: Scene, spec: SyntheticMedia) -> NDArray[np.float32]:
    """The samples of a scene's tone."""
    rng = np.random.Generator(np.random.PCG64([spec.seed, 3, scene.index]))
    count = round(spec.seconds * spec.sample_rate)
    start, end = TONES[scene.tone]
    shift = 0.94 + 0.12 * rng.random()
    pitch = np.linspace(start * shift, end * shift, count)
    phase = 2 * np.pi * (np.cumsum(pitch) / spec.sample_rate + rng.random())
    loud = 0.3 + 0.4 * rng.random()
    overtone = 0.2 * rng.random()
    noise = (rng.random(count) - 0.5) * 0.02
    return (loud * (np.sin(phase) + overtone * np.sin(2 * phase)) / 1.2 + noise).astype(np.float32)


def records(listed: list[Scene]) -> Iterator[tuple[str, dict[str, object]]]:
    """("captions" or "chat", record) of scenes; every question is a record."""
    for scene in listed:
        yield "captions", {"text": scene.caption, **scene.media}
        marks = "".join(f"<{modality}>\n" for modality in scene.media)
        files = {f"{modality}s": [file] for modality, file in scene.media.items()}
        for question, answer in scene.questions:
            turns = [
                {"role": "user", "content": marks + question},
                {"role": "assistant", "content": answer},
            ]
            yield "chat", {"messages": turns, **files}


def write_media(folder: Path, spec: SyntheticMedia = SyntheticMedia()) -> dict[str, Path]:
    """Write the set below a folder; the JSONL files by name (captions, captions_heldout, chat, chat_heldout)."""
    files: dict[str, Path] = {}
    for name in ("images", "sounds"):
        with writing(folder):
            (folder / name).mkdir(parents=True, exist_ok=True)
    for suffix, listed in zip(("", "_heldout"), scenes(spec), strict=True):
        for scene in listed:
            for modality, file in scene.media.items():
                data = (
                    write_png(draw_image(scene, spec))
                    if modality == "image"
                    else write_wave(draw_sound(scene, spec), spec.sample_rate)
                )
                with writing(
                    folder / file, len(data)
                ):  # the JSONL files come last and whole: without them nothing is read
                    (folder / file).write_bytes(data)
        lines: dict[str, list[str]] = {"captions": [], "chat": []}
        for kind, record in records(listed):
            lines[kind].append(json.dumps(record, ensure_ascii=False) + "\n")
        for kind, written in lines.items():
            files[kind + suffix] = folder / f"{kind}{suffix}.jsonl"
            write_atomic(files[kind + suffix], "".join(written))
    return files

"""The generated multimodal set: a coloured shape at a place in a picture, and a tone. In: a spec
and a seed; out: PNG, WAV and JSONL files.

    OUT/images/000000.png   OUT/sounds/000000.wav
    OUT/captions.jsonl            {"text": "a red circle on the left with a low tone",
                                   "image": "images/000000.png", "audio": "sounds/..."}
    OUT/captions_heldout.jsonl    the same for combinations of shape, colour, place and tone that
                                  captions.jsonl never shows
    OUT/chat.jsonl                {"messages": [{"role": "user", "content":
                                   "<image>\\n<audio>\\nWhat colour is the shape?"}, ...],
                                   "images": [...], "audios": [...]}
    OUT/chat_heldout.jsonl

A caption names what is present and nothing else; so do questions. Size, place, brightness, pitch
and loudness vary, and pixels and samples carry noise, so that no two files are equal. Invariant:
the same spec gives the same bytes; needs numpy alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.media.png import write_png
from headway.media.sound import write_wave
from headway.media.synthetic_options import SyntheticMedia
from headway.runtime.storage import write_atomic, writing

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "purple": (160, 60, 190),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
PLACES = {
    "in the centre": (0.5, 0.5),
    "on the left": (0.25, 0.5),
    "on the right": (0.75, 0.5),
    "at the top": (0.5, 0.25),
    "at the bottom": (0.5, 0.75),
}
"""Name -> x and y of the shape's centre, as shares of the picture."""
TONES = {
    "low": (250.0, 250.0),
    "middle": (700.0, 700.0),
    "high": (2000.0, 2000.0),
    "rising": (350.0, 1600.0),
    "falling": (1600.0, 350.0),
}
"""Name -> the frequency at the start and at the end."""
HELD_OUT = 0.2
"""This share of the combinations of shape, colour, place and tone is held out, chosen at random:
few enough that no value, and no two values, rule out another."""


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
        if not self.has_audio:
            return seen
        if not self.has_image:
            return heard
        return f"{seen} with {heard}"

    @property
    def questions(self) -> list[tuple[str, str]]:
        """Questions and answers about what is present."""
        questions: list[tuple[str, str]] = []
        if self.has_image:
            questions += [
                ("What colour is the shape?", self.colour),
                ("What shape is it?", self.shape),
                ("Where is the shape?", self.place),
            ]
        if self.has_audio:
            questions.append(("What kind of tone is it?", self.tone))
        return questions

    @property
    def media(self) -> dict[str, str]:
        """Modality -> the file, relative to the folder."""
        files: dict[str, str] = {}
        if self.has_image:
            files["image"] = f"images/{self.index:06d}.png"
        if self.has_audio:
            files["audio"] = f"sounds/{self.index:06d}.wav"
        return files


ANSWERS = {
    "What colour is the shape?": tuple(COLOURS),
    "What shape is it?": SHAPES,
    "Where is the shape?": tuple(PLACES),
    "What kind of tone is it?": tuple(TONES),
}
"""Question -> every answer; chance is one over their number."""


def scenes(spec: SyntheticMedia) -> tuple[list[Scene], list[Scene]]:
    """The training scenes, and the scenes of held-out combinations. All samples of both are
    shuffled by the seed alone."""
    rng = np.random.Generator(np.random.PCG64([spec.seed, 1]))
    shown, held_out = _combinations(spec.sounds)
    # One stream of random numbers: training scenes come first, so `heldout` does not change them.
    train = [_scene(number, shown, spec.missing, rng) for number in range(spec.samples)]
    numbers = range(spec.samples, spec.samples + spec.heldout)
    asked = [_scene(number, held_out, 0.0, rng) for number in numbers]
    if spec.sounds:
        return train, asked
    return [_without_sound(scene) for scene in train], [_without_sound(scene) for scene in asked]


def _without_sound(scene: Scene) -> Scene:
    return replace(scene, has_image=True, has_audio=False)


def _combinations(
    sounds: bool,
) -> tuple[list[tuple[str, str, str, str]], list[tuple[str, str, str, str]]]:
    """The combinations of training, and those held out; the same for every seed."""
    tones = tuple(TONES)
    if not sounds:
        # Nobody hears it: pictures alone tell combinations apart.
        tones = tones[:1]
    combinations: list[tuple[str, str, str, str]] = list(product(SHAPES, COLOURS, PLACES, tones))
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(combinations))
    held_out = set(order[: round(HELD_OUT * len(combinations))].tolist())
    sides: tuple[list[tuple[str, str, str, str]], list[tuple[str, str, str, str]]] = ([], [])
    for number, combination in enumerate(combinations):
        sides[number in held_out].append(combination)
    return sides


def _scene(
    index: int,
    combinations: list[tuple[str, str, str, str]],
    missing: float,
    rng: np.random.Generator,
) -> Scene:
    shape, colour, where, tone = combinations[int(rng.random() * len(combinations))]
    # One draw for both, so that a sample never lacks both.
    draw = rng.random()
    return Scene(
        index, shape, colour, where, tone, has_image=draw >= missing, has_audio=draw < 1 - missing
    )


def draw_image(scene: Scene, spec: SyntheticMedia) -> NDArray[np.uint8]:
    """The picture of a scene, `[size, size, 3]`."""
    # A stream of its own for each file, and another one for its sound: files can be made in any
    # order.
    rng = np.random.Generator(np.random.PCG64([spec.seed, 2, scene.index]))
    size = spec.image_size
    x, y = PLACES[scene.place]
    x = x + 0.06 * (rng.random() - 0.5)
    y = y + 0.06 * (rng.random() - 0.5)
    radius = 0.13 + 0.06 * rng.random()
    light = 0.85 + 0.15 * rng.random()
    behind = 20 + 40 * rng.random()
    centres = (np.arange(size) + 0.5) / size
    inside = _inside(scene.shape, (centres[None, :] - x) / radius, (centres[:, None] - y) / radius)
    pixels = np.where(inside[:, :, None], np.array(COLOURS[scene.colour]) * light, behind)
    noise = rng.integers(-8, 9, (size, size, 3))
    return np.clip(np.floor(pixels) + noise, 0, 255).astype(np.uint8)


def _inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    # In units of the shape's radius, y downwards.
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
    # The pitch changes, so the phase is its running sum.
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
    """Write the set below a folder; the JSONL files by name (captions, captions_heldout, chat,
    chat_heldout)."""
    files: dict[str, Path] = {}
    names = ["images"]
    if spec.sounds:
        names.append("sounds")
    for name in names:
        with writing(folder):
            (folder / name).mkdir(parents=True, exist_ok=True)
    for suffix, listed in zip(("", "_heldout"), scenes(spec), strict=True):
        for scene in listed:
            for modality, file in scene.media.items():
                if modality == "image":
                    data = write_png(draw_image(scene, spec))
                else:
                    data = write_wave(draw_sound(scene, spec), spec.sample_rate)
                # Not atomic: the JSONL files come last and whole, and without them nothing is read.
                with writing(folder / file, len(data)):
                    (folder / file).write_bytes(data)
        lines: dict[str, list[str]] = {"captions": [], "chat": []}
        for kind, record in records(listed):
            lines[kind].append(json.dumps(record, ensure_ascii=False) + "\n")
        for kind, written in lines.items():
            files[kind + suffix] = folder / f"{kind}{suffix}.jsonl"
            write_atomic(files[kind + suffix], "".join(written))
    return files

"""The media inputs of a model, as data: which modalities enter, how wide their features are, how
many positions an item takes.

    item            one image or sound; an encoder turns it into `vectors` feature vectors of `width` numbers
    pooled          vectors = 1: the projector makes `tokens` embeddings of the one vector
    patches         vectors > 1: the projector makes one embedding of each vector, and tokens = vectors

The shape is a field of `ModelConfig`, so a checkpoint says by itself how media enter the model.
Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROJECTOR = "projector."
"""Starts the names of everything that turns features into embeddings."""
ALIGNER = "aligner."
"""Starts the names of the phase-1 projections; they never train here."""
SHARED = "shared"
"""Name of a projector that serves all modalities."""


@dataclass(frozen=True)
class MediaInput:
    """One modality as it enters a model."""

    modality: str
    width: int
    """Numbers of one feature vector."""
    tokens: int
    """Positions of one item in a row."""
    vectors: int = 1
    """Feature vectors of one item; 1 = pooled."""
    encoder: str = field(default="", compare=False)
    """What made the features: a kind or a folder (media_encoders.py). Inference reads it. It is
    not compared: a run whose files were moved has the same inputs."""

    @property
    def is_pooled(self) -> bool:
        """Whether one vector becomes all tokens."""
        return self.vectors == 1


@dataclass(frozen=True)
class MediaShape:
    """All media inputs of a model, and the projector's form."""

    inputs: tuple[MediaInput, ...]
    hidden: int
    """Width between the projector's two linears."""
    shared: bool = False
    """One projector for all modalities."""
    aligned: int | None = None
    """Width after the frozen phase-1 projections; null = features enter the projector as they
    are."""
    missing: bool = True
    """A conversation has positions for every modality; those without media hold a learned
    embedding."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> MediaShape:
        """A shape from plain values."""
        inputs: list[MediaInput] = []
        for media_input in given["inputs"]:
            if not isinstance(media_input, MediaInput):
                media_input = MediaInput(**media_input)
            inputs.append(media_input)
        return cls(**{**given, "inputs": tuple(inputs)})

    @property
    def modalities(self) -> tuple[str, ...]:
        """The names of the modalities, in the order of their soft tokens."""
        return tuple(media_input.modality for media_input in self.inputs)

    def of(self, modality: str) -> MediaInput:
        """The input of one modality."""
        return self.inputs[self.modalities.index(modality)]

    def problem(self) -> str | None:
        """Why the shape cannot be built; None if it can."""
        if not self.inputs or len(set(self.modalities)) != len(self.inputs):
            return (
                f"media inputs are {list(self.modalities)}; give at least one modality, each once"
            )
        for entry in self.inputs:
            name = entry.modality
            if min(entry.width, entry.tokens, entry.vectors, self.hidden) < 1:
                return f"{name} has width {entry.width}, tokens {entry.tokens}, vectors {entry.vectors}; all must be at least 1"
            if not entry.is_pooled and entry.tokens != entry.vectors:
                return f"{name} has {entry.vectors} vectors and {entry.tokens} tokens; without pooling every vector is a token"

        # A shared projector has one shape, so all inputs must give the same.
        forms = {
            (self.aligned or entry.width, entry.tokens, entry.is_pooled) for entry in self.inputs
        }
        if self.shared and len(forms) > 1:
            listed = ", ".join(
                f"{entry.modality} {self.aligned or entry.width} x {entry.tokens} tokens"
                for entry in self.inputs
            )
            return f"a shared projector needs the same width and tokens for every modality, and they are {listed}"
        return None

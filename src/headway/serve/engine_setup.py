"""What an engine process is started with, and what it says of its model once it is loaded.

No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.infer.engine.request import EngineOptions

if TYPE_CHECKING:
    import numpy as np

    from headway.model.head_masks.choice import MaskChoice
    from headway.prepare.media_inputs import MediaInputSpec
    from headway.records.encode_media import NativePositions
    from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class EngineSetup:
    """What the engine process of one model is started with. It is pickled into its pipe."""

    name: str
    """What clients call it."""
    path: str
    """What --model means."""
    options: EngineOptions = field(default_factory=EngineOptions)
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name -> folder."""
    masks: MaskChoice | None = None
    device: str = "auto"
    precision: str = "auto"
    tensor: int = 1
    """Ranks that share the layers."""


class DecodedMedia(NamedTuple):
    """A picture or a sound as its encoder reads it."""

    modality: str
    array: np.ndarray[Any, Any]


@dataclass(frozen=True)
class EngineFacts:
    """What the HTTP process knows of a loaded model: it makes prompts and checks limits without
    torch.
    """

    name: str
    tokenizer: Tokenizer | None
    context: int
    """Tokens of a request, prompt included."""
    vocab: int
    hidden_size: int
    end_ids: frozenset[int]
    device: str
    dtype: str
    parameters: int
    adapters: tuple[str, ...] = ()
    masks: Mapping[str, Any] | None = None
    media: Mapping[str, int] = field(default_factory=dict)
    """Tokens of one picture or sound, by modality; empty: the model takes text alone."""
    media_missing: bool = False
    """Every prompt has positions for each modality."""
    native: NativePositions | None = None
    """How pictures stand in prompts of a model with its own vision tower."""
    constraints: bool = False
    """Answers can follow a grammar."""
    fingerprint: str = ""
    """Of the tokenizer."""
    media_inputs: Mapping[str, MediaInputSpec] = field(default_factory=dict)
    """How the encoder of a modality reads an item."""
    media_problem: str = ""
    """Why no media are taken although the model has positions for them: its encoder cannot be
    opened.
    """

    def is_same_model(self, other: EngineFacts) -> bool:
        """Whether prompts made for one are right for the other.

        The context may differ: it follows the free memory.
        """
        # The tokenizer by its fingerprint: the object itself came through a pipe.
        return all(getattr(self, name) == getattr(other, name) for name in IDENTITY)


IDENTITY = (
    "fingerprint",
    "vocab",
    "hidden_size",
    "end_ids",
    "parameters",
    "adapters",
    "media",
    "media_missing",
    "native",
    "constraints",
)
"""Fields of EngineFacts that an engine must have again when it is started again."""

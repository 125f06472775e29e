"""What an engine process is started with, and what it says of its model once it is loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.infer.engine.request import EngineOptions

if TYPE_CHECKING:
    from headway.model.head_masks.choice import MaskChoice
    from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class EngineSetup:
    """One model of a server."""

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


@dataclass(frozen=True)
class EngineFacts:
    """A model that is ready."""

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
    constraints: bool = False
    """Answers can follow a grammar."""

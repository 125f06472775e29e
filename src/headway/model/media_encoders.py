"""Which encoder a model with media inputs was trained on, as text (`MediaInput.encoder`), and the
encoder that a text describes.

    {"kind": "huggingface", "path": ..., "pool": ...}     the settings of a frozen encoder (model/encoders)
    {"aligner": "runs/align/final"}                       the encoder of a phase-1 run: frozen, or its trained tower
    ""                                                    features came from a table; generation needs an encoder by name

A path that is not absolute is below the folder of the model, where an export puts the encoders it
brings along.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.load import validate
from headway.errors import ConfigError
from headway.model.encoders import KINDS
from headway.model.encoders.base import EncoderConfig
from headway.model.loading.aligner_file import StoredAligner, is_aligner_folder, read_aligner_folder

if TYPE_CHECKING:
    from headway.model.encoders.base import FrozenMediaEncoder

ALIGNER_KEY = "aligner"
PURRSIGHT_ENCODERS = ("mobilenet_v4", "cnn14")
"""Kinds that PurrSight's aligners were trained with, on inputs prepared in its own way."""
PATCH_LAYER = -2
"""The layer whose patches LLaVA takes."""


def aligner_folder(path: Path) -> Path | None:
    """The folder of a phase-1 run that has encoders beside its heads; None for a file of heads
    alone."""
    for folder in (path, path / "final", path.parent):
        if folder.is_dir() and is_aligner_folder(folder):
            return folder
    return None


def encoder_text(name: str, modality: str, *, patches: bool, is_purrsight: bool = False) -> str:
    """The encoder that a recipe names: a kind, a kind with its file (`cnn14:FILE`), or a Hugging
    Face folder or hub id.

    `is_purrsight`: it feeds an aligner that PurrSight trained, so PurrSight's own encoders read
    media as PurrSight does.
    """
    # A kind comes before a folder of the same name.
    kind, _, file = name.partition(":")
    if name in KINDS:
        settings: dict[str, Any] = {"kind": name}
    elif kind in KINDS and file:
        settings = {"kind": kind, "path": str(Path(file).resolve())}
        if is_purrsight and kind in PURRSIGHT_ENCODERS:
            settings["preprocessing"] = "purrsight"
    else:
        # Absolute, since the text is read again from other folders; a hub id stays as it is.
        path = str(Path(name).resolve()) if Path(name).is_dir() else name
        settings = {"kind": "huggingface", "path": path}
        if patches:
            settings |= {"pool": "none", "layer": PATCH_LAYER}

    # An encoder that trains from scratch has no features before phase 1.
    config = _config(settings, modality)
    if config.TRAINS:
        raise ConfigError(
            f"multimodal.{modality}.encoder is {name}, which must be trained first (recipe "
            "multimodal/align). Give multimodal.aligner."
        )
    return json.dumps(settings)


def aligned_encoder_text(folder: Path, modality: str) -> str:
    """The encoder of a modality in a phase-1 run."""
    stored = read_aligner_folder(folder)
    if modality not in stored.config.encoders:
        raise ConfigError(
            f"multimodal.aligner: {folder} has no encoder for {modality}; it has "
            f"{', '.join(stored.config.encoders)}."
        )
    return json.dumps({ALIGNER_KEY: str(folder.resolve())})


def _config(settings: dict[str, Any], modality: str) -> EncoderConfig:
    kind = settings.get("kind")
    if kind not in KINDS:
        raise ConfigError(
            f"the encoder of {modality} has kind {kind!r}; kinds are {', '.join(KINDS)}."
        )
    module = import_module(f"headway.model.encoders.{kind}")
    config: EncoderConfig = validate(module.Config, settings)
    if modality not in config.FOR:
        raise ConfigError(
            f"the encoder of {modality} has kind {config.kind}, which encodes "
            f"{', '.join(config.FOR)}. Use another."
        )
    return config


def open_encoder(text: str, modality: str, model_folder: Path | None = None) -> FrozenMediaEncoder:
    """The encoder of a text, loaded once."""
    # A model that was trained on a table of features does not know what made them.
    if not text:
        raise ConfigError(
            f"the model was trained on a table of {modality} features, so its encoder is unknown. "
            "Use a model trained on an encoder."
        )
    return _opened(text, modality, model_folder)


@lru_cache(maxsize=8)
def _opened(text: str, modality: str, model_folder: Path | None) -> FrozenMediaEncoder:
    description = json.loads(text)
    if ALIGNER_KEY not in description:
        return _config(description, modality).build(modality)

    folder = Path(description[ALIGNER_KEY])
    if not folder.is_absolute() and model_folder is not None:
        folder = model_folder / folder
    if not is_aligner_folder(folder):
        raise ConfigError(
            f"the encoder of {modality} is that of {folder}, which is not there any more. Put the "
            "folder back."
        )
    # A frozen encoder of phase 1 is opened by its settings, a trained one by its weights.
    stored = read_aligner_folder(folder)
    config = stored.config.encoders[modality]
    if config.TRAINS:
        return _tower(stored, modality)
    return config.build(modality)


def _tower(stored: StoredAligner, modality: str) -> FrozenMediaEncoder:
    """The trained tower of an aligner as a frozen encoder: features as its head takes them."""
    from torch import Tensor, nn

    from headway.model.encoders.frozen import FrozenModule

    class OneVector(nn.Module):
        def __init__(self, tower: nn.Module) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, inputs: Tensor) -> Tensor:
            return self.tower(inputs)[:, None]

    # The identity of the encoder is its weights: features in a cache belong to them.
    digest = hashlib.sha256()
    for name, value in sorted(stored.weights.items()):
        if name.startswith(f"towers.{modality}."):
            digest.update(name.encode() + value.contiguous().numpy().tobytes())
    tower = stored.load().towers[modality]
    return FrozenModule(
        modality,
        OneVector(tower),
        stored.config.encoders[modality].input_of(modality),
        f"tower {digest.hexdigest()[:32]}",
    )

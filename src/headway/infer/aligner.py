"""What `--model X` means for an aligner: a run, its final/, an exported folder or a checkpoint
comes in, an aligner goes out.

`AlignedEncoder` is one modality of it as an encoder: a picture or sound in, its vector in the
common space out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headway.checkpoint.load import locate, open_checkpoint
from headway.config.kinds import kind_config
from headway.config.load import read_yaml, validate
from headway.errors import CheckpointError, ConfigError
from headway.model.aligner_config import AlignerConfig
from headway.model.config import ModelConfig
from headway.model.encoders.rows import frozen_encoder
from headway.model.loading.aligner_file import StoredAligner, is_aligner_folder, read_aligner_folder
from headway.optim.groups import OBJECTIVE
from headway.tasks.base import TaskConfig

if TYPE_CHECKING:
    import torch

    from headway.model.aligner import Aligner
    from headway.prepare.media_inputs import Array, MediaInputSpec

FINAL = "final"


def find_aligner(path: Path) -> StoredAligner:
    """The aligner a path means."""
    # An exported folder, or the final/ of a run that has ended; otherwise a checkpoint.
    for folder in (path, path / FINAL):
        if is_aligner_folder(folder):
            return read_aligner_folder(folder)
    if not path.is_dir():
        raise ConfigError(
            f"model is {str(path)!r}, which is not a folder. Give a run of recipe "
            "multimodal/align or its final/."
        )
    return _from_checkpoint(path)


def _from_checkpoint(path: Path) -> StoredAligner:
    reader = open_checkpoint(locate(path))
    shape: Any = reader.scalars.get("model")
    if not isinstance(shape, dict) or not isinstance(shape.get("aligner"), dict):
        raise ConfigError(f"{path}: is not an aligner. Give a run of recipe multimodal/align.")
    config = validate(ModelConfig, shape).aligner_settings
    task = _task_of(path, config)

    # Scales are trained with the task: a checkpoint has them among its parameters, under a prefix.
    weights: dict[str, torch.Tensor] = {}
    task_weights: dict[str, torch.Tensor] = {}
    for name in reader.names():
        if name.startswith(OBJECTIVE):
            task_weights[name.removeprefix(OBJECTIVE)] = reader.weight(name)
        else:
            weights[name] = reader.weight(name)
    return StoredAligner(path, config, weights, task.scales_of(config.modalities, task_weights))


def _task_of(path: Path, config: AlignerConfig) -> TaskConfig:
    """The task's settings, from the recipe of the run that a checkpoint belongs to."""
    # A checkpoint lies a few folders below its recipe; one further up may be another run's.
    for folder in (path, *path.parents[:3]):
        if (folder / "recipe.yaml").is_file():
            objective = read_yaml(folder / "recipe.yaml").get("objective", {})
            settings = kind_config("headway.tasks", str(objective.get("kind")), TaskConfig)
            task = settings.model_validate_json(json.dumps(objective))
            assert isinstance(task, TaskConfig)
            task.check_modalities(config.modalities)
            return task
    raise CheckpointError(
        f"{path}: there is no recipe.yaml above the checkpoint, which says what its scales are. "
        "Give the run folder."
    )


@dataclass
class AlignedEncoder:
    """One modality of an aligner as a frozen encoder: vectors of the common space (`aligned`), or
    those before the head."""

    modality: str
    model: Aligner
    config: AlignerConfig
    identity: str
    aligned: bool = True
    tokens: int = 1

    def __post_init__(self) -> None:
        encoder = self.config.encoders[self.modality]
        # A tower of the aligner reads inputs itself; a frozen encoder makes features of them first.
        if encoder.TRAINS:
            self._frozen = None
        else:
            self._frozen = frozen_encoder(encoder, self.modality)
        if self._frozen is None:
            self.input: MediaInputSpec = encoder.input_of(self.modality)
        else:
            self.input = self._frozen.input
        if self.aligned:
            self.width = self.config.dim
        else:
            self.width = self.config.width_of(self.modality)

    def to(self, device: torch.device | str) -> Self:
        """Compute on this device."""
        self.model.to(device)
        if self._frozen is not None:
            self._frozen.to(device)
        return self

    def encode(self, inputs: Array) -> Array:
        """float32 [n, 1, width] of n prepared pictures or sounds: one vector each."""
        import torch

        device = next(self.model.parameters()).device
        if self._frozen is None:
            tower_inputs = inputs
        else:
            tower_inputs = self._frozen.encode(inputs)
        with torch.no_grad():
            media = torch.from_numpy(np.ascontiguousarray(tower_inputs)).to(device)
            if self.aligned:
                vectors = self.model.embed(self.modality, media)
            else:
                vectors = self.model.features(self.modality, media)
        return vectors.float().cpu().numpy()[:, None]


def aligned_encoders(
    path: Path, modalities: Sequence[str] | None = None, *, aligned: bool = True
) -> dict[str, AlignedEncoder]:
    """The encoders of an aligner by modality; a modality it lacks is an error."""
    import hashlib

    stored = find_aligner(path)
    if modalities is None:
        wanted = stored.config.modalities
    else:
        wanted = tuple(modalities)
    absent = [name for name in wanted if name not in stored.config.modalities]
    if absent:
        raise ConfigError(
            f"{path}: the aligner has no {absent[0]}; it has {', '.join(stored.config.modalities)}."
        )
    # The identity names cached features, so it covers weights as well as settings; where the
    # weights came from does not count.
    digest = hashlib.sha256(stored.config.model_dump_json(exclude={"weights"}).encode())
    for name in sorted(stored.weights):
        digest.update(name.encode() + stored.weights[name].float().cpu().numpy().tobytes())
    model = stored.load()
    kind = "aligned" if aligned else "features"
    return {
        name: AlignedEncoder(
            name, model, stored.config, f"aligner {digest.hexdigest()[:32]} {name} {kind}", aligned
        )
        for name in wanted
    }

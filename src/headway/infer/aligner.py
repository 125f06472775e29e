"""What `--model X` means for an aligner: a run, its final/, an exported folder or a checkpoint comes in, an aligner goes out.

`AlignedEncoder` is one modality of it as an encoder: a picture or sound in, its vector in the common space out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headway.checkpoint.load import locate, open_checkpoint
from headway.config.load import read_yaml, validate
from headway.errors import CheckpointError, ConfigError
from headway.model.aligner_config import AlignerConfig
from headway.model.config import ModelConfig
from headway.model.encoders.rows import frozen_encoder
from headway.model.loading.aligner_file import StoredAligner, is_aligner_folder, read_aligner_folder
from headway.optim.groups import OBJECTIVE
from headway.tasks.contrastive import LOG_SCALE
from headway.tasks.contrastive import Config as ContrastiveConfig

if TYPE_CHECKING:
    import torch

    from headway.model.aligner import Aligner
    from headway.prepare.media_inputs import Array, MediaInputSpec

FINAL = "final"


def find_aligner(path: Path) -> StoredAligner:
    """The aligner a path means."""
    for folder in (path, path / FINAL):
        if is_aligner_folder(folder):
            return read_aligner_folder(folder)
    if not path.is_dir():
        raise ConfigError(
            f"model is {str(path)!r}, which is not a folder. Give a run of recipe multimodal/align or its final/."
        )
    return _from_checkpoint(path)


def _from_checkpoint(path: Path) -> StoredAligner:
    reader = open_checkpoint(locate(path))
    shape: Any = reader.scalars.get("model")
    if not isinstance(shape, dict) or not isinstance(shape.get("aligner"), dict):
        raise ConfigError(f"{path}: is not an aligner. Give a run of recipe multimodal/align.")
    config = validate(ModelConfig, shape).aligner
    assert config is not None
    names = [name for name in reader.names() if not name.startswith(OBJECTIVE)]
    scale = f"{OBJECTIVE}{LOG_SCALE}"
    trained = reader.weight(scale) if scale in reader.names() else None
    objective = _objective_of(path, config)
    return StoredAligner(
        path,
        config,
        {name: reader.weight(name) for name in names},
        objective.scales_of(config.modalities, trained),
    )


def _objective_of(path: Path, config: AlignerConfig) -> ContrastiveConfig:
    """The objective's settings, from the recipe of the run that a checkpoint belongs to."""
    for folder in (path, *path.parents[:3]):
        if (folder / "recipe.yaml").is_file():
            found = ContrastiveConfig.model_validate_json(
                json.dumps(read_yaml(folder / "recipe.yaml").get("objective", {}))
            )
            found.check(config.modalities)
            return found
    raise CheckpointError(
        f"{path}: there is no recipe.yaml above the checkpoint, which says what its scales are. Give the run folder."
    )


@dataclass
class AlignedEncoder:
    """One modality of an aligner as a frozen encoder: vectors of the common space (`aligned`), or those before the head."""

    modality: str
    model: Aligner
    config: AlignerConfig
    identity: str
    aligned: bool = True
    tokens: int = 1

    def __post_init__(self) -> None:
        one = self.config.encoders[self.modality]
        self._frozen = None if one.TRAINS else frozen_encoder(one, self.modality)
        self.input: MediaInputSpec = (
            one.input_of(self.modality) if self._frozen is None else self._frozen.input
        )
        self.width = self.config.dim if self.aligned else self.config.width_of(self.modality)

    def to(self, device: torch.device | str) -> Self:
        """Compute on this device."""
        self.model.to(device)
        if self._frozen is not None:
            self._frozen.to(device)
        return self

    def encode(self, inputs: Array) -> Array:
        """float32 [n, 1, width]."""
        import torch

        device = next(self.model.parameters()).device
        given = inputs if self._frozen is None else self._frozen.encode(inputs)
        with torch.no_grad():
            media = torch.from_numpy(np.ascontiguousarray(given)).to(device)
            found = (
                self.model.embed(self.modality, media)
                if self.aligned
                else self.model.features(self.modality, media)
            )
        return found.float().cpu().numpy()[:, None]


def aligned_encoders(
    path: Path, modalities: Sequence[str] | None = None, *, aligned: bool = True
) -> dict[str, AlignedEncoder]:
    """The encoders of an aligner by modality; a modality it lacks is an error."""
    import hashlib

    stored = find_aligner(path)
    wanted = stored.config.modalities if modalities is None else tuple(modalities)
    absent = [name for name in wanted if name not in stored.config.modalities]
    if absent:
        raise ConfigError(
            f"{path}: the aligner has no {absent[0]}; it has {', '.join(stored.config.modalities)}."
        )
    digest = hashlib.sha256(stored.config.model_dump_json(exclude={"weights"}).encode())
    for name in sorted(stored.weights):
        digest.update(name.encode() + stored.weights[name].float().cpu().numpy().tobytes())
    model = stored.load()
    what = "aligned" if aligned else "features"
    return {
        name: AlignedEncoder(
            name, model, stored.config, f"aligner {digest.hexdigest()[:32]} {name} {what}", aligned
        )
        for name in wanted
    }

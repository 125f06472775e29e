"""What `--model X` means for an aligner: a run, its final/, an exported folder or a checkpoint
comes in, an aligner goes out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.load import locate, open_checkpoint
from headway.config.kinds import kind_config
from headway.config.load import read_yaml, validate
from headway.errors import CheckpointError, ConfigError
from headway.model.aligner_config import AlignerConfig
from headway.model.config import ModelConfig
from headway.model.loading.aligner_file import StoredAligner, is_aligner_folder, read_aligner_folder
from headway.optim.groups import OBJECTIVE
from headway.tasks.base import TaskConfig

if TYPE_CHECKING:
    import torch


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

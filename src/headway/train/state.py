"""All that resumes: the engine's tensors, the data cursor and a few numbers. `TrainState` is the only object that is saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.load import Reader
from headway.checkpoint.retention import retain
from headway.checkpoint.save import TensorRecord, Writers, save_checkpoint
from headway.data.loader import LoaderState
from headway.errors import CheckpointError
from headway.model.config import ModelConfig
from headway.parallel.collectives import Group
from headway.parallel.engine import Engine


@dataclass
class TrainState:
    """Where a run stands after `step` updates."""

    engine: Engine
    model: ModelConfig
    cursor: LoaderState
    step: int = 0
    consumed_tokens: int = 0
    epoch: int = 0
    """Completed passes over the data."""
    seconds: float = 0.0
    """Training time so far, over all starts."""

    def save(self, checkpoints: Path, tokenizer: Path | None, keep_last: int, ranks: Group = Group()) -> Path:
        """Write a checkpoint, every rank its part, and let the oldest go."""
        self.engine.flush()
        records = (TensorRecord(*tensor) for tensor in self.engine.tensors())
        path = save_checkpoint(checkpoints, self.step, records, self._scalars(), tokenizer, Writers(ranks.rank, ranks.size, ranks.gather))
        if ranks.rank == 0:
            retain(checkpoints, keep_last)
        return path

    def _scalars(self) -> dict[str, Any]:
        return {
            "model": self.model.model_dump(mode="json"),
            "engine": self.engine.scalars(),
            "cursor": self.cursor.to_json(),
            "consumed_tokens": self.consumed_tokens,
            "epoch": self.epoch,
            "seconds": self.seconds,
        }

    def restore(self, reader: Reader) -> None:
        """Take everything back from a checkpoint."""
        scalars: Any = reader.scalars
        if ModelConfig.model_validate_json(json.dumps(scalars["model"])) != self.model:
            raise CheckpointError(f"{reader.path}: it holds a model of another shape than the recipe's.")
        self.engine.load(reader.read, scalars["engine"])
        self.cursor = LoaderState.from_json(scalars["cursor"])
        self.step = reader.step
        self.consumed_tokens = scalars["consumed_tokens"]
        self.epoch = scalars["epoch"]
        self.seconds = scalars["seconds"]

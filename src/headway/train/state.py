"""All that resumes: the engine's tensors, the data cursor and a few numbers. `TrainState` is the only object that is saved."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.checkpoint.best import VALID
from headway.checkpoint.load import Reader
from headway.checkpoint.save import TensorRecord
from headway.data.loader import LoaderState
from headway.errors import CheckpointError, ConfigError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.parallel.engine import Engine
from headway.train.patience import Patience
from headway.train.watch import Watch

log = logging.getLogger("headway")


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
    adapter: AdapterConfig | None = None
    adapter_base: str | None = None
    """Where the model lies that the adapter belongs to."""
    watch: Watch | None = None
    """The last good losses."""
    patience: Patience = Patience()
    """How long the run has waited for a better validation."""
    data: Sequence[Mapping[str, str]] = ()
    """What every source holds, as checksums."""
    accepts_other_data: bool = False
    valid: dict[str, Any] | None = None
    """The numbers of the validation after this very step; None if there was none."""

    def records(self) -> Iterator[TensorRecord]:
        """Every tensor to save, as this rank holds it."""
        self.engine.flush()
        return (TensorRecord(*tensor) for tensor in self.engine.tensors())

    def scalars(self) -> dict[str, Any]:
        """Everything to save that is no tensor."""
        return {
            "model": self.model.model_dump(mode="json"),
            "engine": self.engine.scalars(),
            "adapter": None if self.adapter is None else {"config": self.adapter.model_dump(mode="json"), "base": self.adapter_base},
            "cursor": self.cursor.to_json(),
            "data": list(self.data),
            "consumed_tokens": self.consumed_tokens,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "watch": None if self.watch is None else self.watch.scalars(),
            VALID: finite(self.valid),
            "patience": self.patience.to_json(),
        }

    def restore(self, reader: Reader) -> None:
        """Take everything back from a checkpoint."""
        scalars: Any = reader.scalars
        if ModelConfig.model_validate_json(json.dumps(scalars["model"])) != self.model:
            raise CheckpointError(f"{reader.path}: it holds a model of another shape than the recipe's.")
        self._check_adapter(reader)
        changed = changed_data(scalars.get("data"), self.data)
        if changed and not self.accepts_other_data:
            raise other_data(reader, changed)
        self.engine.load(reader.read, scalars["engine"])
        if changed:
            log.warning("other data than %s was trained on: %s; it is read from its beginning (data.accept_changed)", reader.path, changed)
        else:
            self.cursor = LoaderState.from_json(scalars["cursor"])
        self.step = reader.step
        self.consumed_tokens = scalars["consumed_tokens"]
        self.epoch = scalars["epoch"]
        self.seconds = scalars["seconds"]
        if self.watch is not None:
            self.watch.load(scalars.get("watch"))
        self.patience = Patience(**scalars.get("patience", {}))

    def _check_adapter(self, reader: Reader) -> None:
        form: Any = reader.scalars.get("adapter")
        held = None if form is None else AdapterConfig.model_validate_json(json.dumps(form["config"]))
        same = held == self.adapter or (held is not None and self.adapter is not None and held.same_form(self.adapter, self.model))
        if not same:
            raise CheckpointError(f"{reader.path}: its adapter ({'none' if held is None else held.kind}) is not the recipe's.")
        if form is not None:
            self.adapter_base = form["base"]


def changed_data(before: Any, now: Sequence[Mapping[str, str]]) -> str:
    """Which sources hold other data than a checkpoint says; empty where all is the same, or where the checkpoint does not say."""
    if not before:
        return ""
    old = [(one["set"], one["content"]) for one in before]
    return ", ".join(
        f"{one['source']} ({one['set']})"
        for place, one in enumerate(now)
        if place >= len(old) or (one["set"], one["content"]) != old[place]
    ) or ("fewer sources" if len(old) > len(now) else "")


def other_data(reader: Reader, changed: str) -> ConfigError:
    """What to say where a run would continue on other data."""
    return ConfigError(
        f"the data changed since {reader.path} was saved: {changed} holds other documents now, although it has the same path. Put the old "
        "data back, set data.accept_changed=true to train on the new data from its beginning, or use --resume never."
    )


def finite(value: Any) -> Any:
    """The same numbers, null where JSON has none for them."""
    if isinstance(value, dict):
        return {name: finite(below) for name, below in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""What a checkpoint holds: the engine's tensors, the data cursor and a few numbers. `TrainState` is the only object that is saved.

`init.content` says what a new run takes from another run's checkpoint:

    model       the weights                    optimizer   moments, update counts, loss scale
    scheduler   the step of the schedule       sampler     the position in the data
    rng         derived from the seed and the step, so it comes with the scheduler where the seeds are the same

An InternLM folder has optimizer and scheduler too. Its position in the data does not fit headway's order of documents and is refused.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from headway.checkpoint.best import VALID
from headway.checkpoint.load import Reader, locate, open_checkpoint
from headway.data.loader import LoaderState
from headway.errors import CheckpointError, ConfigError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.model.loading.internlm import InternlmState, is_internlm
from headway.parallel.box import StateTensor
from headway.parallel.engine import Engine
from headway.runtime.paths import parse_path
from headway.train.config import Content, Recipe
from headway.train.early_stopping import EarlyStopping
from headway.train.health import LossMonitor

log = logging.getLogger("headway")


@dataclass
class TrainState:
    """The state of a run after `step` updates."""

    engine: Engine
    model: ModelConfig
    cursor: LoaderState | None = None
    """The position in the data; None = the beginning, until the loader is made."""
    step: int = 0
    consumed_tokens: int = 0
    epoch: int = 0
    """Completed passes over the data."""
    seconds: float = 0.0
    """Training time so far, over all starts."""
    adapter: AdapterConfig | None = None
    adapter_base: str | None = None
    """The model the adapter belongs to."""
    loss_monitor: LossMonitor | None = None
    early_stopping: EarlyStopping = EarlyStopping()
    data: Sequence[Mapping[str, str]] = ()
    """Checksums of every source."""
    accepts_other_data: bool = False
    valid: dict[str, Any] | None = None
    """The validation after this very step; None if there was none."""

    def records(self) -> Iterator[StateTensor]:
        """Every tensor to save: this rank's share."""
        self.engine.flush()
        return self.engine.tensors()

    def scalars(self) -> dict[str, Any]:
        """Everything to save that is not a tensor. The keys are the format of checkpoints."""
        assert self.cursor is not None, "a state is saved after its loader was made"
        return {
            "model": self.model.model_dump(mode="json"),
            "engine": self.engine.scalars(),
            "adapter": None
            if self.adapter is None
            else {"config": self.adapter.model_dump(mode="json"), "base": self.adapter_base},
            "cursor": self.cursor.to_json(),
            "data": list(self.data),
            "consumed_tokens": self.consumed_tokens,
            "epoch": self.epoch,
            "seconds": self.seconds,
            "watch": None if self.loss_monitor is None else self.loss_monitor.scalars(),
            VALID: finite(self.valid),
            "patience": self.early_stopping.to_json(),
        }

    def restore(self, reader: Reader) -> None:
        """Load everything from a checkpoint."""
        scalars: Any = reader.scalars
        if ModelConfig.model_validate_json(json.dumps(scalars["model"])) != self.model:
            raise CheckpointError(f"{reader.path}: its model has another shape than the recipe's.")
        self._check_adapter(reader)
        changed = changed_data(scalars.get("data"), self.data)
        if changed and not self.accepts_other_data:
            raise other_data(reader, changed)
        self.engine.load(reader.read, scalars["engine"])
        if changed:
            log.warning(
                "the data changed since %s: %s; reading it from its beginning (data.accept_changed)",
                reader.path,
                changed,
            )
        else:
            self.cursor = LoaderState.from_json(scalars["cursor"])
        self.step = reader.step
        self.consumed_tokens = scalars["consumed_tokens"]
        self.epoch = scalars["epoch"]
        self.seconds = scalars["seconds"]
        if self.loss_monitor is not None:
            self.loss_monitor.load(scalars.get("watch"))
        self.early_stopping = EarlyStopping(**scalars.get("patience", {}))

    def _check_adapter(self, reader: Reader) -> None:
        form: Any = reader.scalars.get("adapter")
        saved = (
            None if form is None else AdapterConfig.model_validate_json(json.dumps(form["config"]))
        )
        same = saved == self.adapter or (
            saved is not None
            and self.adapter is not None
            and saved.same_form(self.adapter, self.model)
        )
        if saved is not None and self.adapter is not None and saved.base != self.adapter.base:
            raise CheckpointError(
                f"{reader.path}: its adapter.base is {saved.base}, and the recipe's is {self.adapter.base}."
            )
        if not same:
            raise CheckpointError(
                f"{reader.path}: its adapter ({'none' if saved is None else saved.kind}) is not the recipe's."
            )
        if form is not None:
            self.adapter_base = form["base"]


def first_position(
    recipe: Recipe, checkpoint: Reader | None, data: Sequence[Mapping[str, str]]
) -> tuple[int, LoaderState | None] | None:
    """The step and the cursor at which a run begins or resumes, before its state exists; None if `init.content` decides it."""
    if checkpoint is None:
        return (0, None) if recipe.init.contents == ("model",) else None
    scalars: Any = checkpoint.scalars
    if changed_data(scalars.get("data"), data):
        return checkpoint.step, None  # data.accept_changed, or restoring refuses it
    return checkpoint.step, LoaderState.from_json(scalars["cursor"])


def changed_data(before: Any, now: Sequence[Mapping[str, str]]) -> str:
    """Which sources differ from those of a checkpoint; empty where all are the same, or where the checkpoint does not say."""
    if not before:
        return ""
    old = [(one["set"], one["content"]) for one in before]
    return ", ".join(
        f"{one['source']} ({one['set']})"
        for index, one in enumerate(now)
        if index >= len(old) or (one["set"], one["content"]) != old[index]
    ) or ("fewer sources" if len(old) > len(now) else "")


def other_data(reader: Reader, changed: str) -> ConfigError:
    """The error for a run that would resume on other data."""
    return ConfigError(
        f"the data changed since {reader.path} was saved: {changed} holds other documents under the same path. Put the old "
        "data back, set data.accept_changed=true to train on the new data from its beginning, or use --resume never."
    )


def finite(value: Any) -> Any:
    """The same numbers, with None for those JSON cannot express."""
    if isinstance(value, dict):
        return {name: finite(below) for name, below in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def apply_init_content(recipe: Recipe, state: TrainState) -> None:
    """Take what `init.content` lists from the checkpoint in `init.from`; the weights are there already."""
    wanted: set[str] = set(recipe.init.contents)
    if wanted == {"model"} or recipe.init.source is None:
        return
    place = parse_path(recipe.init.source)
    if isinstance(place, Path) and is_internlm(place):
        _take_internlm(InternlmState(place, state.model), wanted, state)
        _log_content(place, wanted)
        return
    try:
        reader = open_checkpoint(locate(place))
    except (CheckpointError, ConfigError) as problem:
        raise ConfigError(
            f"init.content is {sorted(wanted)}; only a headway checkpoint has more than the model: {problem}"
        ) from None
    scalars: Any = reader.scalars
    if "optimizer" in wanted:
        state.engine.load(reader.read, scalars["engine"])
    if "scheduler" in wanted:
        state.step, state.consumed_tokens = reader.step, scalars["consumed_tokens"]
    if "sampler" in wanted:
        if (
            changed := changed_data(scalars.get("data"), state.data)
        ) and not state.accepts_other_data:
            raise other_data(reader, changed)
        state.cursor, state.epoch = LoaderState.from_json(scalars["cursor"]), scalars["epoch"]
    _log_content(reader.path, wanted)


def _take_internlm(given: InternlmState, wanted: set[str], state: TrainState) -> None:
    if "sampler" in wanted:
        raise ConfigError(
            f"init.content has sampler, but {given.folder} is InternLM's: its position in the data does not fit headway's order of "
            "documents. Give init.content=[model, optimizer, scheduler]."
        )
    if "optimizer" in wanted:
        state.engine.load(given.read, given.scalars())
    if "scheduler" in wanted:
        state.step, state.consumed_tokens = given.step, given.consumed_tokens


def _log_content(source: object, wanted: set[str]) -> None:
    left = [name for name in get_args(Content) if name not in wanted]
    taken = [name for name in get_args(Content) if name in wanted]
    log.info(
        "taken from %s: %s%s",
        source,
        ", ".join(taken),
        f"; not taken: {', '.join(left)}" if left else "",
    )

"""What a checkpoint holds: the engine's tensors, the data cursor and a few numbers.

`TrainState` is the only object that is saved.

`init.content` says what a new run takes from another run's checkpoint:

    model       the weights                    optimizer   moments, update counts, loss scale
    scheduler   the step of the schedule       sampler     the position in the data
    rng         derived from the seed and the step: it comes with the scheduler if the seeds agree

An InternLM folder has optimizer and scheduler too. Its position in the data does not fit headway's
order of documents and is refused.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from headway.checkpoint.best import VALID
from headway.checkpoint.load import Reader, locate, open_checkpoint
from headway.data.loader import LoaderState
from headway.errors import CheckpointError, ConfigError
from headway.model.adapter.config import AdapterConfig
from headway.model.config import ModelConfig
from headway.parallel.box import StateTensor
from headway.parallel.engine import Engine
from headway.runtime.paths import parse_path
from headway.train.config import Content, Recipe
from headway.train.early_stopping import EarlyStopping
from headway.train.health import LossMonitor

if TYPE_CHECKING:
    from headway.model.loading.internlm import InternlmState

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
    lr_scale: float = 1.0
    """What callbacks multiply all learning rates by."""
    callback_stop: dict[str, Any] | None = None
    """The request of a callback that ended the run: reason, step and total_steps at that time."""
    valid: dict[str, Any] | None = None
    """The validation after this very step; None if there was none."""

    def records(self) -> Iterator[StateTensor]:
        """Every tensor to save: this rank's share."""
        # Gathers of updated parameters may still be running.
        self.engine.flush()
        return self.engine.tensors()

    def scalars(self) -> dict[str, Any]:
        """Everything to save that is not a tensor. The keys are the format of checkpoints."""
        assert self.cursor is not None, "a state is saved after its loader was made"
        adapter = None
        if self.adapter is not None:
            adapter = {"config": self.adapter.model_dump(mode="json"), "base": self.adapter_base}
        return {
            "model": self.model.model_dump(mode="json"),
            "engine": self.engine.scalars(),
            "adapter": adapter,
            "cursor": self.cursor.to_json(),
            "data": list(self.data),
            "consumed_tokens": self.consumed_tokens,
            "epoch": self.epoch,
            "seconds": self.seconds,
            # Two keys have the names of early versions: checkpoints of all versions are read.
            "watch": None if self.loss_monitor is None else self.loss_monitor.scalars(),
            VALID: finite(self.valid),
            "patience": self.early_stopping.to_json(),
            "callbacks": {"lr_scale": self.lr_scale, "stop": self.callback_stop},
        }

    def restore(self, reader: Reader) -> None:
        """Load everything from a checkpoint. Another model, adapter or data are refused before."""
        scalars: Any = reader.scalars
        if ModelConfig.model_validate_json(json.dumps(scalars["model"])) != self.model:
            raise CheckpointError(f"{reader.path}: its model has another shape than the recipe's.")
        self._check_adapter(reader)
        changed = changed_data(scalars.get("data"), self.data)
        if changed and not self.accepts_other_data:
            raise other_data(reader, changed)

        self.engine.load(reader.read, scalars["engine"])
        if changed:
            # The cursor counts documents of the old data; without one the loader starts anew.
            log.warning(
                "the data changed since %s: %s; reading it from its beginning "
                "(data.accept_changed)",
                reader.path,
                changed,
            )
        else:
            self.cursor = LoaderState.from_json(scalars["cursor"])
        self.step = reader.step
        self.consumed_tokens = scalars["consumed_tokens"]
        self.epoch = scalars["epoch"]
        self.seconds = scalars["seconds"]
        # Checkpoints of early versions may lack these.
        if self.loss_monitor is not None:
            self.loss_monitor.load(scalars.get("watch"))
        self.early_stopping = EarlyStopping(**scalars.get("patience", {}))
        from_callbacks = scalars.get("callbacks", {})
        self.lr_scale = from_callbacks.get("lr_scale", 1.0)
        self.callback_stop = from_callbacks.get("stop")

    def _check_adapter(self, reader: Reader) -> None:
        """Refuse a checkpoint with another adapter; take the name of the adapter's base from it."""
        scalars: Any = reader.scalars.get("adapter")
        saved = None
        if scalars is not None:
            saved = AdapterConfig.model_validate_json(json.dumps(scalars["config"]))

        if saved is not None and self.adapter is not None:
            if saved.base != self.adapter.base:
                raise CheckpointError(
                    f"{reader.path}: its adapter.base is {saved.base}, "
                    f"and the recipe's is {self.adapter.base}."
                )
            # Two configs may name the same layers by different patterns.
            is_same = saved == self.adapter or saved.same_form(self.adapter, self.model)
        else:
            is_same = saved == self.adapter
        if not is_same:
            kind = "none" if saved is None else saved.kind
            raise CheckpointError(f"{reader.path}: its adapter ({kind}) is not the recipe's.")

        if scalars is not None:
            self.adapter_base = scalars["base"]


class Clock:
    """Training time over all starts of a run."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self.start()

    def start(self) -> None:
        """Count from now on. The loop calls it again: building a run is no training time."""
        self._before = self.state.seconds
        self._epoch = self.state.epoch
        self._began = time.perf_counter()
        self._epoch_began = self._began

    def seconds(self) -> float:
        """Training time so far, over all starts."""
        return self._before + time.perf_counter() - self._began

    def log_epoch(self) -> None:
        """Log the time of an epoch once it is complete."""
        if self.state.epoch > self._epoch:
            now = time.perf_counter()
            log.info("epoch %d completed in %.1f s", self.state.epoch, now - self._epoch_began)
            self._epoch = self.state.epoch
            self._epoch_began = now


def first_position(
    recipe: Recipe, checkpoint: Reader | None, data: Sequence[Mapping[str, str]]
) -> tuple[int, LoaderState | None] | None:
    """The step and the cursor at which a run begins or resumes, before its state exists.

    None if `init.content` decides it.
    """
    if checkpoint is None:
        if recipe.init.contents == ("model",):
            return (0, None)
        return None
    scalars: Any = checkpoint.scalars
    if changed_data(scalars.get("data"), data):
        # The run reads changed data from its beginning (data.accept_changed); otherwise restoring
        # the checkpoint will refuse it.
        return checkpoint.step, None
    return checkpoint.step, LoaderState.from_json(scalars["cursor"])


def changed_data(before: Any, now: Sequence[Mapping[str, str]]) -> str:
    """Which sources differ from those of a checkpoint.

    Empty where all are the same, or where the checkpoint does not say.

    Sources are compared by set and checksum, in order. Their paths may have changed.
    """
    if not before:
        return ""
    old = [(source["set"], source["content"]) for source in before]
    changed: list[str] = []
    for index, source in enumerate(now):
        if index >= len(old) or (source["set"], source["content"]) != old[index]:
            changed.append(f"{source['source']} ({source['set']})")
    if not changed and len(old) > len(now):
        return "fewer sources"
    return ", ".join(changed)


def other_data(reader: Reader, changed: str) -> ConfigError:
    """The error for a run that would resume on other data."""
    return ConfigError(
        f"the data changed since {reader.path} was saved: "
        f"{changed} holds other documents under the same path. Put the old "
        "data back, set data.accept_changed=true to train on the new data from its beginning, "
        "or use --resume never."
    )


def finite(value: Any) -> Any:
    """The same numbers, with None for those JSON cannot express."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def apply_init_content(recipe: Recipe, state: TrainState) -> None:
    """Take what `init.content` lists from the checkpoint in `init.from`.

    The weights are there already.
    """
    wanted: set[str] = set(recipe.init.contents)
    if wanted == {"model"} or recipe.init.source is None:
        return

    from headway.model.loading.internlm import InternlmState, is_internlm

    # A run folder, a checkpoint or an object store: `locate` finds the checkpoint in it.
    path = parse_path(recipe.init.source)
    if isinstance(path, Path) and is_internlm(path):
        _take_internlm_content(InternlmState(path, state.model), wanted, state)
        _log_content(path, wanted)
        return

    try:
        reader = open_checkpoint(locate(path))
    except (CheckpointError, ConfigError) as problem:
        raise ConfigError(
            f"init.content is {sorted(wanted)}; only a headway checkpoint has more than the model: "
            f"{problem}"
        ) from None

    # `model` is in the engine already. `rng` needs nothing: it is derived from seed and step.
    scalars: Any = reader.scalars
    if "optimizer" in wanted:
        state.engine.load(reader.read, scalars["engine"])
    if "scheduler" in wanted:
        state.step = reader.step
        state.consumed_tokens = scalars["consumed_tokens"]
        state.lr_scale = scalars.get("callbacks", {}).get("lr_scale", 1.0)
    if "sampler" in wanted:
        changed = changed_data(scalars.get("data"), state.data)
        if changed and not state.accepts_other_data:
            raise other_data(reader, changed)
        state.cursor = LoaderState.from_json(scalars["cursor"])
        state.epoch = scalars["epoch"]
    _log_content(reader.path, wanted)


def _take_internlm_content(stored: InternlmState, wanted: set[str], state: TrainState) -> None:
    if "sampler" in wanted:
        raise ConfigError(
            f"init.content has sampler, but {stored.folder} is InternLM's: "
            "its position in the data does not fit headway's order of documents. "
            "Give init.content=[model, optimizer, scheduler]."
        )
    if "optimizer" in wanted:
        state.engine.load(stored.read, stored.scalars())
    if "scheduler" in wanted:
        state.step = stored.step
        state.consumed_tokens = stored.consumed_tokens


def _log_content(source: object, wanted: set[str]) -> None:
    taken = [name for name in get_args(Content) if name in wanted]
    not_taken = [name for name in get_args(Content) if name not in wanted]
    rest = ""
    if not_taken:
        rest = f"; not taken: {', '.join(not_taken)}"
    log.info("taken from %s: %s%s", source, ", ".join(taken), rest)

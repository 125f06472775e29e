"""`init.content`: what a new run takes from the checkpoint it starts from, beside the weights; what was and was not taken is said.

model       the weights                    optimizer   moments, update counts, loss scale
scheduler   the step the schedule is at    sampler     the place in the data
rng         derived from the seed and the step: nothing is stored, so it comes with the scheduler where the seeds are the same

An InternLM folder gives optimizer and scheduler too. Its place in the data means nothing to headway's order of documents: refused.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, get_args

from headway.checkpoint.load import locate, open_checkpoint
from headway.data.loader import LoaderState
from headway.errors import CheckpointError, ConfigError
from headway.model.loading.internlm import InternlmState, is_internlm
from headway.runtime.paths import parse_path
from headway.train.config import Content, Recipe
from headway.train.state import TrainState, changed_data, other_data

log = logging.getLogger("headway")


def take_content(recipe: Recipe, state: TrainState) -> bool:
    """Bring a state to where the checkpoint's was, as far as the recipe asks; whether the place in the data is another now."""
    wanted: set[str] = set(recipe.init.contents)
    if wanted == {"model"} or recipe.init.source is None:
        return False
    place = parse_path(recipe.init.source)
    if isinstance(place, Path) and is_internlm(place):
        _take_internlm(InternlmState(place, state.model), wanted, state)
        _report(place, wanted)
        return False
    try:
        reader = open_checkpoint(locate(place))
    except (CheckpointError, ConfigError) as problem:
        raise ConfigError(f"init.content is {sorted(wanted)}; only a headway checkpoint holds more than the model: {problem}") from None
    scalars: Any = reader.scalars
    if "optimizer" in wanted:
        state.engine.load(reader.read, scalars["engine"])
    if "scheduler" in wanted:
        state.step, state.consumed_tokens = reader.step, scalars["consumed_tokens"]
    if "sampler" in wanted:
        if (changed := changed_data(scalars.get("data"), state.data)) and not state.accepts_other_data:
            raise other_data(reader, changed)
        state.cursor, state.epoch = LoaderState.from_json(scalars["cursor"]), scalars["epoch"]
    _report(reader.path, wanted)
    return "sampler" in wanted


def _take_internlm(given: InternlmState, wanted: set[str], state: TrainState) -> None:
    if "sampler" in wanted:
        raise ConfigError(
            f"init.content has sampler, but {given.folder} is InternLM's: its place in the data does not fit headway's order of documents. "
            "Give init.content=[model, optimizer, scheduler]."
        )
    if "optimizer" in wanted:
        state.engine.load(given.read, given.scalars())
    if "scheduler" in wanted:
        state.step, state.consumed_tokens = given.step, given.consumed_tokens


def _report(source: object, wanted: set[str]) -> None:
    left = [name for name in get_args(Content) if name not in wanted]
    taken = [name for name in get_args(Content) if name in wanted]
    log.info("taken from %s: %s%s", source, ", ".join(taken), f"; not taken: {', '.join(left)}" if left else "")

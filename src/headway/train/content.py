"""`init.content`: what a new run takes from the checkpoint it starts from, beside the weights; what was and was not taken is said.

model       the weights                    optimizer   moments, update counts, loss scale
scheduler   the step the schedule is at    sampler     the place in the data
rng         derived from the seed and the step: nothing is stored, so it comes with the scheduler where the seeds are the same
"""

from __future__ import annotations

import logging
from typing import Any, get_args

from headway.checkpoint.load import locate, open_checkpoint
from headway.data.loader import LoaderState
from headway.errors import CheckpointError, ConfigError
from headway.train.config import Content, Recipe
from headway.train.state import TrainState

log = logging.getLogger("headway")


def take_content(recipe: Recipe, state: TrainState) -> bool:
    """Bring a state to where the checkpoint's was, as far as the recipe asks; whether the place in the data is another now."""
    wanted = set(recipe.init.contents)
    if wanted == {"model"} or recipe.init.source is None:
        return False
    try:
        reader = open_checkpoint(locate(recipe.init.source))
    except (CheckpointError, ConfigError) as problem:
        raise ConfigError(f"init.content is {sorted(wanted)}; only a headway checkpoint holds more than the model: {problem}") from None
    scalars: Any = reader.scalars
    if "optimizer" in wanted:
        state.engine.load(reader.read, scalars["engine"])
    if "scheduler" in wanted:
        state.step, state.consumed_tokens = reader.step, scalars["consumed_tokens"]
    if "sampler" in wanted:
        state.cursor, state.epoch = LoaderState.from_json(scalars["cursor"]), scalars["epoch"]
    left = [name for name in get_args(Content) if name not in wanted]
    taken = [name for name in get_args(Content) if name in wanted]
    log.info("taken from %s: %s%s", reader.path, ", ".join(taken), f"; not taken: {', '.join(left)}" if left else "")
    return "sampler" in wanted

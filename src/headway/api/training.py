"""`train` of the public API: a recipe, data and callbacks come in; a run folder and a `TrainResult`
go out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.api.data import Data, Kind, with_data
from headway.api.results import TrainResult

if TYPE_CHECKING:
    from headway.track.callbacks import Callback
    from headway.train.config import Recipe


def train(
    recipe: Recipe | str | Path,
    *,
    data: Data | None = None,
    valid: Data | float | None = None,
    kind: Kind | None = None,
    resume: str = "auto",
    callbacks: Sequence[Callback] = (),
    live_chart: bool = True,
) -> TrainResult:
    """Train a recipe to its end in this process; a run folder that has a checkpoint is continued, a
    finished one is left as it is.

    `data` and `valid` replace `data.train` and `data.valid`: paths, a list of dicts, a Hugging Face
    dataset or an iterator of dicts; a float for `valid` holds out that share of the training
    documents. `kind` says what records are, if the recipe does not. `resume` is auto, never, or a
    checkpoint. `callbacks` follow the run and may act on it (see `Callback`). In a notebook a chart
    below the cell follows the run, unless `live_chart` is false.

    Ctrl-C saves the run and raises `Interrupted`; SIGTERM saves it and raises `Terminated`. For
    several GPUs start the script with torchrun, or use `headway train`.

    Example:
        >>> recipe = hw.Recipe.load("laptop/pretrain", {"tokenizer": "tokenizers/mine"}, steps=100)
        >>> result = hw.train(recipe, data=[{"text": "Hello."}], valid=[{"text": "World."}])
        >>> print(result)
    """
    from headway.api.notebook import LiveChart, cell_output, in_notebook
    from headway.train import train as train_recipe
    from headway.train.config import Recipe

    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe)
    recipe = with_data(recipe, data, valid, kind)
    if live_chart and in_notebook():
        callbacks = [*callbacks, LiveChart(str(recipe.run.folder), cell_output())]
    return TrainResult.of(train_recipe(recipe, resume=resume, callbacks=callbacks))

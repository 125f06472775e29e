"""`train` of the public API: a recipe, data and callbacks come in; a run folder and a `TrainResult`
go out. Arguments of other trainers are answered with headway's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from headway.api.data import Data, Kind, with_data
from headway.api.results import TrainResult
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.track.callbacks import Callback
    from headway.train.config import Recipe

ARGUMENTS = "recipe, data, valid, kind, resume, callbacks, live_chart"
"""What `train` takes."""
ANSWERS = {
    "args": "settings are those of the recipe: hw.Recipe.load(NAME, {'optim.lr': 1e-4})",
    "model": "the model is a setting of the recipe: hw.Recipe.load(NAME, {'init.from': MODEL})",
    "eval_dataset": "here it is valid=",
    "compute_metrics": "a callback adds metrics: self.control.add_metric(NAME, VALUE)",
    "tokenizer": "the tokenizer is that of the model; a new model has the setting tokenizer=PATH",
    "processing_class": "the tokenizer is that of the model",
    "peft_config": "here it is the setting adapter={'rank': 16}",
    "optimizers": "the optimizer is the setting optim={'kind': 'adamw', 'lr': 1e-4}",
    "optimizer_cls_and_kwargs": (
        "an optimizer of your own is the setting optim={'kind': './FILE.py'} (docs/extend.md)"
    ),
    "model_init": "the model is a setting of the recipe; for several runs call hw.train in a loop",
    "data_collator": "rows are packed from documents by the settings data.packing, data.seq_len",
    "compute_loss_func": (
        "a loss of your own is the setting objective={'kind': './FILE.py'} (docs/extend.md)"
    ),
    "preprocess_logits_for_metrics": (
        "validation keeps no logits; a callback adds metrics: self.control.add_metric(NAME, VALUE)"
    ),
}
"""Arguments of the trainers of transformers and TRL that no setting has the name of."""


def explain_arguments(arguments: Mapping[str, Any]) -> str:
    """One line for arguments that `train` does not have, with what to write instead."""
    from headway.workflows.import_config.names import DATA, find_answer
    from headway.workflows.import_config.rules import has_setting

    lines: list[str] = []
    for name, value in arguments.items():
        answer = ANSWERS.get(name)
        if answer is None and name in DATA:
            answer = "here it is data="
        if answer is None:
            known = find_answer(name, value)
            if known is None and has_setting(name):
                answer = f"it is a setting of the recipe: hw.Recipe.load(NAME, {{'{name}': VALUE}})"
            elif known is None:
                answer = f"it takes {ARGUMENTS}"
            elif known.settings == 1:
                answer = f"{known.text}, a setting of the recipe"
            elif known.settings > 1:
                answer = f"{known.text}, settings of the recipe"
            else:
                answer = known.text
        lines.append(f"hw.train has no argument {name}; {answer}.")
    return " ".join(lines)


def train(
    recipe: Recipe | str | Path,
    *,
    data: Data | None = None,
    valid: Data | float | None = None,
    kind: Kind | None = None,
    resume: str = "auto",
    callbacks: Sequence[Callback] = (),
    live_chart: bool = True,
    **of_others: Never,
) -> TrainResult:
    """Train a recipe to its end in this process; a run folder that has a checkpoint is continued, a
    finished one is left as it is.

    `data` and `valid` replace `data.train` and `data.valid`: paths, a list of dicts, a Hugging Face
    dataset or an iterator of dicts; a float for `valid` holds out that share of the training
    documents. `kind` says what records are, if the recipe does not. `resume` is auto, never, or a
    checkpoint. `callbacks` follow the run and may act on it (see `Callback`). In a notebook a chart
    below the cell follows the run, unless `live_chart` is false. There are no other arguments: for
    those of other trainers the error names the setting of a recipe.

    Ctrl-C saves the run and raises `Interrupted`; SIGTERM saves it and raises `Terminated`. For
    several GPUs start the script with torchrun, or use `headway train`.

    Example:
        >>> recipe = hw.Recipe.load("laptop/pretrain", {"tokenizer": "tokenizers/mine"}, steps=100)
        >>> result = hw.train(recipe, data=[{"text": "Hello."}], valid=[{"text": "World."}])
        >>> print(result)
    """
    from headway.api.notebook import LiveChart, cell_output, in_notebook
    from headway.train import train as train_recipe
    from headway.train.callbacks import check_callbacks
    from headway.train.config import Recipe

    if of_others:
        raise ConfigError(explain_arguments(of_others))
    # Before data is prepared, which may take long.
    check_callbacks(callbacks)
    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe)
    recipe = with_data(recipe, data, valid, kind)
    if live_chart and in_notebook():
        from headway.board.runs import planned_steps

        # Of a recipe with stages, the steps of all of them.
        total_steps = planned_steps(recipe.model_dump(mode="json", exclude_unset=True))
        chart = LiveChart(str(recipe.run.folder), cell_output(), total_steps)
        callbacks = [*callbacks, chart]
    return TrainResult.of(train_recipe(recipe, resume=resume, callbacks=callbacks))

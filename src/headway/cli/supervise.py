"""`headway supervise`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headway.cli import train
from headway.cli._options import flatten, read_recipe
from headway.cli._output import exit_with

if TYPE_CHECKING:
    from headway.train.config import Recipe

COMMAND_HELP = "What to run, after --: headway train ..., or torchrun ... -m headway train ..."


def supervise(
    arguments: list[str] = typer.Argument(..., metavar="-- COMMAND...", help=COMMAND_HELP),
    max_restarts: int | None = typer.Option(
        None, min=0, help="Failures in a row, without a newer checkpoint, before it gives up."
    ),
    backoff: float | None = typer.Option(
        None, min=0, help="Seconds before the first restart; doubled with each failure in a row."
    ),
    hang_seconds: float | None = typer.Option(
        None, min=0.1, help="A rank hangs if it makes no progress for this long."
    ),
    run: Path | None = typer.Option(
        None, help="Run folder to watch; default: the one of the recipe in the command."
    ),
) -> None:
    """Run a training command to its end: after a crash or a hang it is restarted from the newest complete checkpoint."""
    from headway.launch.supervise import supervise as run_supervised
    from headway.runtime.process import headway_command
    from headway.train.launch_config import SuperviseConfig

    # Options of the command line replace the settings of the recipe.
    recipe = _find_recipe(arguments)
    overrides = {
        "max_restarts": max_restarts,
        "backoff_seconds": backoff,
        "hang_seconds": hang_seconds,
    }
    settings = SuperviseConfig()
    if recipe is not None:
        settings = recipe.supervise
    settings = settings.model_copy(
        update={name: value for name, value in overrides.items() if value is not None}
    )

    command = arguments
    if arguments[0] == "headway":
        # This installation, whether or not it is on the PATH.
        command = headway_command(arguments[1:])
    exit_with(run_supervised(command, settings, recipe, run))


def _find_recipe(arguments: Sequence[str]) -> Recipe | None:
    """The recipe that a command line trains, if it is headway's; a run that is training already is
    refused.
    """
    # The words may stand behind those of another launcher: torchrun ... -m headway train RECIPE.
    for index in range(1, len(arguments)):
        if arguments[index] == "train" and Path(arguments[index - 1]).name == "headway":
            parameters = _parse_train(arguments[index + 1 :])
            recipe = read_recipe(
                parameters["arguments"] or [], makes_name=parameters["resume"] == "auto"
            )
            _refuse_second(recipe, parameters)
            return recipe
    return None


def _refuse_second(recipe: Recipe, parameters: dict[str, Any]) -> None:
    """Refuse to supervise a run that is training, before anything is written; nodes after the first
    join theirs.
    """
    from headway.runtime.process import from_environment
    from headway.runtime.run_lock import refuse_live

    if not parameters["dry_run"] and not parameters["node_rank"] and from_environment().is_first:
        refuse_live(recipe.run.folder)


def _parse_train(arguments: Sequence[str]) -> dict[str, Any]:
    """The arguments of `headway train`, as its own parser sees them."""
    import typer.main

    # A context parses the words and does not call the verb.
    app = typer.Typer(add_completion=False)
    app.command("train")(flatten(train.train))
    return typer.main.get_command(app).make_context("train", list(arguments)).params


VERBS = {"supervise": supervise}

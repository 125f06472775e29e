"""`headway supervise`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from headway.train.config import Recipe, SuperviseConfig

COMMAND_HELP = "What to run, after --: headway train ..., or torchrun ... -m headway train ..."


def command(
    arguments: list[str] = typer.Argument(..., metavar="-- COMMAND...", help=COMMAND_HELP),
    max_restarts: int | None = typer.Option(None, min=0, help="Failures in a row, without a newer checkpoint, before it gives up."),
    backoff: float | None = typer.Option(None, min=0, help="Seconds before the first restart; doubled with each failure in a row."),
    hang_seconds: float | None = typer.Option(None, min=0.1, help="A rank without progress for so long hangs."),
    run: Path | None = typer.Option(None, help="Run folder to watch; default: the one of the recipe in the command."),
) -> None:
    """Run a training command to its end: after a crash or a hang it is started again, from the newest complete checkpoint."""
    from headway.train.config import SuperviseConfig

    recipe = recipe_of(arguments)
    if recipe is not None:
        _refuse_second(recipe, arguments)
    given = {"max_restarts": max_restarts, "backoff_seconds": backoff, "hang_seconds": hang_seconds}
    settings = recipe.supervise if recipe is not None else SuperviseConfig()
    settings = settings.model_copy(update={name: value for name, value in given.items() if value is not None})
    code = supervise(whole(arguments), settings, recipe, run)
    if code:
        raise typer.Exit(code)


def supervise(arguments: Sequence[str], settings: "SuperviseConfig", recipe: "Recipe | None", run_dir: Path | None = None) -> int:
    """Look after a command; returns its exit code."""
    from headway.errors import LaunchError
    from headway.launch.supervise import Policy, Supervisor
    from headway.runtime.process import safe_environment
    from headway.track.outside import tell_outside

    folder = run_dir if run_dir is not None else recipe.run.folder if recipe is not None else None
    trackers = recipe.track if recipe is not None else ()
    for one in trackers:  # an address that is missing is refused now, not when the first message is due
        if folder is not None and (tracker := one.build_outside(folder, folder.name)) is not None:
            tracker.close()
    policy = Policy(settings.max_restarts, settings.backoff_seconds, settings.hang_seconds)
    supervisor = Supervisor(arguments, policy, folder, safe_environment(arguments, os.environ))
    if folder is not None:
        supervisor.tell = lambda event, text, step: tell_outside(trackers, folder, event, text, step, supervisor.writes)
    try:
        return supervisor.run()
    except (FileNotFoundError, PermissionError) as problem:
        raise LaunchError(f"{arguments[0]}: {problem.strerror}. Give a command that can be run, after --.") from None


def whole(arguments: Sequence[str]) -> list[str]:
    """The command as it is started: `headway` is this one, whether or not it is on the PATH."""
    from headway.runtime.process import own_command

    return own_command(arguments[1:]) if arguments[0] == "headway" else list(arguments)


def recipe_of(arguments: Sequence[str]) -> "Recipe | None":
    """The recipe a command line trains; None where it is not of ours."""
    from headway.cli._recipe import read_recipe

    for place in range(1, len(arguments)):
        if arguments[place] == "train" and Path(arguments[place - 1]).name == "headway":
            return read_recipe(_parsed(arguments[place + 1 :])["arguments"] or [])
    return None


def _refuse_second(recipe: "Recipe", arguments: Sequence[str]) -> None:
    """Refuse to supervise a run that is under way, before anything is written; nodes after the first join theirs."""
    from headway.runtime.process import from_environment
    from headway.runtime.run_lock import refuse_live

    given = _parsed(arguments[list(arguments).index("train") + 1 :])
    if not given["dry_run"] and given["node_rank"] == 0 and from_environment().is_first:
        refuse_live(recipe.run.folder)


def _parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """The arguments of `headway train`, as its own parser sees them."""
    import typer.main

    from headway.cli import train

    app = typer.Typer(add_completion=False)
    app.command("train")(train.command)
    context = typer.main.get_command(app).make_context("train", list(arguments))
    return context.params

"""`headway train`."""

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.cli._recipe import RECIPE_ARGUMENT


def command(
    arguments: list[str] = RECIPE_ARGUMENT,
    resume: str = typer.Option(
        "auto", help="auto: continue the run folder's newest checkpoint; never: begin anew; or a checkpoint folder."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Build everything, run one step, say what would happen, write nothing."),
    json: bool = JSON_FLAG,
) -> None:
    """Train from a recipe. Without a recipe a small model trains on generated data."""
    from headway.cli._recipe import read_recipe
    from headway.train import dry_run as try_recipe
    from headway.train import train

    recipe = read_recipe(arguments)
    outcome = try_recipe(recipe, resume=resume) if dry_run else train(recipe, resume=resume)
    if json:
        print_json(outcome)
    code = outcome.get("exit_code", 0)
    if code:
        raise typer.Exit(code)

"""`headway config show`."""

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.cli._recipe import RECIPE_ARGUMENT


def command(arguments: list[str] = RECIPE_ARGUMENT, json: bool = JSON_FLAG) -> None:
    """Print a recipe as it is understood: every setting, defaults included, and of every stage what it comes to."""
    from headway.cli._recipe import read_recipe
    from headway.config.load import dump_yaml
    from headway.train.expand import resolved_settings

    settings = resolved_settings(read_recipe(arguments))
    if json:
        print_json(settings)
    else:
        typer.echo(dump_yaml(settings), nl=False)

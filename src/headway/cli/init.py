"""`headway init`."""

from pathlib import Path

import typer

from headway.cli._options import JSON, split_recipe
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError


def init(
    arguments: list[str] = typer.Argument(
        None,
        metavar="[NAME] [section.key=value]...",
        help="A shipped recipe (lora, laptop/sft, ...) and overrides; without: list them.",
    ),
    out: Path | None = typer.Option(
        None, help="The file to write; default: NAME.yaml in the working directory."
    ),
    force: bool = typer.Option(False, "--force", help="Replace a file that exists."),
    json: bool = JSON,
) -> None:
    """Write a recipe to edit, with what each setting means. Without a name, list the recipes that come with headway."""
    from headway.config.shipped import find_shipped, unknown_recipe
    from headway.runtime.storage import write_atomic
    from headway.train.starter import commented_recipe, shipped_recipes

    path, overrides = split_recipe(arguments)
    if path is None:
        if overrides or out is not None:
            raise ConfigError(
                f"{(overrides or ['--out'])[0]}: which recipe? Give a name, e.g. headway init lora."
            )
        recipes = shipped_recipes()
        if json:
            print_json({"recipes": recipes})
        else:
            print_table(["recipe", "what it does"], list(recipes.items()))
            typer.echo(
                "\nheadway init NAME writes one to edit; headway train NAME runs it as it is."
            )
        return

    shipped = find_shipped(path)
    if shipped is None:
        raise unknown_recipe(path)
    # laptop/sft becomes sft.yaml here.
    target = out or Path(shipped.name)
    if target.exists() and not force:
        raise ConfigError(
            f"{target}: exists already. Add --force to replace it, or --out FILE for another name."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, commented_recipe(shipped, overrides))
    if json:
        print_json({"recipe": str(path), "file": target})
    else:
        typer.echo(f"wrote {target}. Edit it, then: headway train {target}")


VERBS = {"init": init}

"""`headway config` and `headway list`: recipes, and what a recipe can name."""

import json as json_module
from pathlib import Path

import typer

from headway.cli._options import JSON, RECIPE, read_recipe
from headway.cli._output import print_json, print_table


def show(arguments: list[str] = RECIPE, json: bool = JSON) -> None:
    """Print a recipe with every setting, defaults included, and the resolved settings of every stage."""
    from headway.config.load import dump_yaml
    from headway.train.stages import resolved_settings

    settings = resolved_settings(read_recipe(arguments))
    if json:
        print_json(settings)
    else:
        typer.echo(dump_yaml(settings), nl=False)


def diff(
    first: Path = typer.Argument(
        ..., metavar="A", help="A recipe (a file or a name) or a run folder."
    ),
    second: Path = typer.Argument(..., metavar="B", help="Another one."),
    json: bool = JSON,
) -> None:
    """Show the settings in which two recipes or runs differ, defaults included."""
    from headway.train.compare import compare_recipes

    def cell(value: object) -> str:
        if isinstance(value, str):
            return value
        return json_module.dumps(value, ensure_ascii=False)

    differences = compare_recipes(first, second)
    if json:
        print_json(
            {
                "differences": [
                    {"setting": difference.key, "a": difference.first, "b": difference.second}
                    for difference in differences
                ]
            }
        )
    elif differences:
        print_table(
            ("setting", str(first), str(second)),
            [
                (difference.key, cell(difference.first), cell(difference.second))
                for difference in differences
            ],
        )
    else:
        typer.echo("no setting differs")


def reference() -> None:
    """Print the page of all settings (Markdown), as in docs/settings.md."""
    from headway.train.settings_page import settings_page

    typer.echo(settings_page(), nl=False)


def schema() -> None:
    """Print the JSON schema of recipes, for editors: `# yaml-language-server: $schema=recipe.schema.json`."""
    from headway.train.config import Recipe

    print_json(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **Recipe.model_json_schema(by_alias=True),
        }
    )


def import_verb(
    source: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="A configuration of another system: YAML, JSON, Python or a shell script.",
    ),
    system: str = typer.Option(
        ...,
        "--from",
        help="axolotl, flare, internlm, llamafactory, openrlhf, prulong, purrsight, trl or verl.",
    ),
    out: Path | None = typer.Option(None, help="Write the recipe to this file; default: print it."),
    json: bool = JSON,
) -> None:
    """Turn a configuration of another system into a recipe, and list the keys without a counterpart. The file is never executed."""
    from headway.errors import ConfigError
    from headway.runtime.storage import write_atomic
    from headway.workflows.import_config import import_config
    from headway.workflows.import_config.rules import shown

    # An imported recipe is edited afterwards; a second import must not undo that.
    if out is not None and out.exists():
        raise ConfigError(f"--out {out} exists already. Give another name, or remove it first.")

    imported = import_config(source, system)
    if out is not None:
        write_atomic(out, imported.as_yaml())

    if json:
        print_json(
            {
                "recipe": imported.recipe,
                "keys": [entry.as_json() for entry in imported.report],
                "not_installed": imported.not_installed(),
                "out": out and str(out),
            }
        )
    elif out is None:
        typer.echo(imported.as_yaml(), nl=False)
    else:
        # Keys without a value say nothing, and some systems write all of them.
        listed = [entry for entry in imported.report if entry.outcome != "empty"]
        print_table(
            (imported.system, "value", "", "headway", "note"),
            [
                (entry.key, shown(entry.value, 40), entry.outcome, entry.headway, entry.note)
                for entry in listed
            ],
        )
        lost = len(imported.not_carried_over)
        typer.echo(
            f"\nrecipe: {out} ({lost} {'key is' if lost == 1 else 'keys are'} not carried over). "
            f"Check it: headway config show {out}"
        )
    # Standard output may be the recipe itself.
    if not json:
        for line in imported.not_installed():
            typer.echo(f"note: {line}", err=True)


def list_kinds(json: bool = JSON) -> None:
    """Show families, presets, objectives and every other kind a recipe can name."""
    from headway.train.settings_page import catalogue

    kinds = catalogue()
    if json:
        print_json(kinds)
    else:
        print_table(
            ["what", "names"], [(label, ", ".join(names)) for label, names in kinds.items()]
        )


VERBS = {
    "config diff": diff,
    "config import": import_verb,
    "config reference": reference,
    "config schema": schema,
    "config show": show,
    "list": list_kinds,
}

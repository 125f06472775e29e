"""`headway config diff`."""

from pathlib import Path
from typing import Any

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    first: Path = typer.Argument(..., metavar="A", help="A recipe file or a run folder."),
    second: Path = typer.Argument(..., metavar="B", help="Another one."),
    json: bool = JSON_FLAG,
) -> None:
    """Show the settings in which two recipes or runs differ, defaults included."""
    from headway.train.compare import compare_recipes

    differences = compare_recipes(first, second)
    if json:
        print_json({"differences": [{"setting": one.key, "a": one.first, "b": one.second} for one in differences]})
    elif differences:
        print_table(("setting", str(first), str(second)), [(one.key, _shown(one.first), _shown(one.second)) for one in differences])
    else:
        typer.echo("no setting differs")


def _shown(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

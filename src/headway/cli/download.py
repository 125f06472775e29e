"""`headway download`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    repo_id: str = typer.Argument(..., metavar="ID", help="ORGANISATION/NAME on the Hugging Face hub (or the mirror HF_ENDPOINT names)."),
    dataset: bool = typer.Option(False, "--dataset", help="A dataset; otherwise a model."),
    include: list[str] = typer.Option([], help="Only files that match, e.g. '*.safetensors'; may be given several times."),
    revision: str = typer.Option(None, help="A branch, tag or commit; default: main."),
    to: Path = typer.Option(None, help="Put the files into this folder; otherwise into the shared cache."),
    cache_dir: Path = typer.Option(None, help="The cache to use instead of the hub's own (HF_HOME); what a recipe has as data.cache_dir."),
    json: bool = JSON_FLAG,
) -> None:
    """Fetch a model or a dataset; run again, it continues inside the file that was cut off."""
    from headway.text.hub import fetch

    folder = fetch(repo_id, dataset=dataset, include=include, revision=revision, to=to, cache_dir=cache_dir)
    if json:
        print_json({"id": repo_id, "path": folder})
    else:
        typer.echo(str(folder))

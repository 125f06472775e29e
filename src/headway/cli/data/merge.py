"""`headway data merge`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    stores: list[Path] = typer.Argument(..., help="Token stores, or all the shards of one `data tokenize --shard`."),
    out: Path = typer.Option(..., help="The folder of the new token store."),
    json: bool = JSON_FLAG,
) -> None:
    """Join token stores into one; the shards of one tokenization come out as if it had not been divided."""
    from headway.store.merge import merge

    store = merge(stores, out)
    result = {"out": out, "documents": store.num_documents, "tokens": store.num_tokens}
    if json:
        print_json(result)
    else:
        typer.echo(f"{out}: {store.num_tokens} tokens in {store.num_documents} documents")

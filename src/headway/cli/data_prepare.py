"""`headway data prepare`: what a recipe reads, made before it trains."""

from __future__ import annotations

from dataclasses import asdict

import typer

from headway.cli._options import JSON, RECIPE, read_recipe
from headway.cli._output import print_json, print_table


def prepare(
    arguments: list[str] = RECIPE,
    workers: int = typer.Option(
        None,
        min=1,
        help="Processes that tokenize; default: one per core. The result does not depend on them.",
    ),
    json: bool = JSON,
) -> None:
    """Download, tokenize and encode the data of a recipe into its cache, where training finds it; media pass their encoders here, too."""
    from headway.runtime.log import start_logging
    from headway.train.batches import prepare_data

    with start_logging():
        found = prepare_data(read_recipe(arguments, makes_tokenizer=True), workers)
    if json:
        print_json({"sources": [asdict(one) for one in found]})
        return
    print_table(
        ("set", "source", "documents", "tokens"),
        [(one.set, one.source, one.documents, one.tokens) for one in found],
    )


VERBS = {"data prepare": prepare}

"""`headway sparsify`."""

from __future__ import annotations

import typer

from headway.cli._eval_output import print_long
from headway.cli._options import GROUP, JSON, RECIPE, read_recipe
from headway.cli._output import print_json, print_report_path
from headway.workflows.sparsify_options import SparsifyPlan


def sparsify(
    arguments: list[str] = RECIPE,
    plan: SparsifyPlan = GROUP,
    nproc: int | None = typer.Option(None, help="Train in this many ranks of this machine."),
    gpus: str | None = typer.Option(None, help="Train on these GPUs, as `headway train --gpus`."),
    json: bool = JSON,
) -> None:
    """Train head gates, export masks, measure the model with and without them, and report the saved cache; resumable."""
    from headway.train.run_name import name_override
    from headway.workflows.sparsify import sparsify as run
    from headway.workflows.sparsify import train_in_processes

    # The name is chosen here and handed to the ranks, so that all use one run folder.
    recipe = read_recipe(arguments, makes_name=True)
    train = None
    if nproc is not None or gpus is not None:
        train = train_in_processes([*(arguments or []), name_override(recipe)], nproc, gpus)
    done = run(recipe, plan, train=train)
    if isinstance(done, int):
        raise typer.Exit(done)
    if json:
        print_json(done.to_json())
    else:
        print_long(done.result)
        print_report_path(done.folder)


VERBS = {"sparsify": sparsify}

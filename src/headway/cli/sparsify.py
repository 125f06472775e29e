"""`headway sparsify`."""

from __future__ import annotations

import typer

from headway.cli._eval_output import print_long
from headway.cli._options import EQUAL_PER_LAYER, GROUP, JSON, RECIPE, read_recipe
from headway.cli._output import print_json, print_report_path
from headway.cli.eval import LongOptions, parse_lengths, parse_numbers


def sparsify(
    arguments: list[str] = RECIPE,
    sparsities: str | None = typer.Option(
        None,
        help="Shares of streaming heads to export and measure (0.5,0.7); default: objective.target.",
    ),
    tasks: str = typer.Option(
        "key_value", help="Tasks, comma separated; `headway eval long --help` lists them."
    ),
    lengths: str | None = typer.Option(
        None, help="Tokens of the prompts (4096 or 4k), comma separated; default: data.seq_len."
    ),
    random_masks: bool = typer.Option(True, help="Also measure random masks with as many heads."),
    equal_per_layer: bool = EQUAL_PER_LAYER,
    masks: str | None = typer.Option(
        None,
        metavar="own|none|FILE",
        help="Also measure these masks: own (where the gates ended) or a file; default: none.",
    ),
    options: LongOptions = GROUP,
    nproc: int | None = typer.Option(None, help="Train in this many ranks of this machine."),
    gpus: str | None = typer.Option(None, help="Train on these GPUs, as `headway train --gpus`."),
    json: bool = JSON,
) -> None:
    """Train head gates, export masks, measure the model with and without them, and report the saved cache; resumable."""
    from headway.train.run_name import name_override
    from headway.workflows.sparsify import SparsifyPlan, train_in_processes
    from headway.workflows.sparsify import sparsify as run

    plan = SparsifyPlan(
        parse_numbers("--sparsities", sparsities) if sparsities is not None else (),
        tuple(tasks.split(",")),
        parse_lengths(lengths) if lengths is not None else (),
        parse_numbers("--depths", options.depths),
        options.samples,
        random_masks,
        equal_per_layer,
        tuple(options.data),
        options.rows,
        options.seed,
        options.chunk_tokens,
        masks,
        options.chat_template,
        options.bos,
    )
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

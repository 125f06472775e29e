"""`headway train` and `headway stop`."""

import os
from dataclasses import replace
from pathlib import Path

import typer

from headway.cli._options import GROUP, JSON, RECIPE, read_recipe, split_recipe
from headway.cli._output import exit_with, print_json
from headway.launch.options import LaunchOptions, TrainOptions
from headway.train.control import StopRequest

GPUS_HELP = (
    "GPUs: ids as in nvidia-smi (0,1), UUIDs, a type (A800), auto (all free ones) or none; "
    "default: run.gpus."
)


def train(
    arguments: list[str] = RECIPE,
    options: TrainOptions = GROUP,
    nproc: int | None = typer.Option(
        None, help="Ranks to start on this machine; default: one per chosen GPU, else one."
    ),
    gpus: str | None = typer.Option(None, help=GPUS_HELP),
    nnodes: int = typer.Option(
        1, help="Machines of the run; start the same command on each with its own --node-rank."
    ),
    node_rank: int | None = typer.Option(
        None, help="The index of this machine, from 0; default: SLURM's inside srun, else 0."
    ),
    master: str | None = typer.Option(
        None,
        metavar="HOST:PORT",
        help="Where machine 0 listens; the same on all; default: from SLURM inside srun.",
    ),
    node_timeout: float = typer.Option(300.0, help="Seconds to wait for the other machines."),
    json: bool = JSON,
) -> None:
    """Train from a recipe. Without one, data.train=FILE chooses it by what the file holds; without data too, the data is generated."""
    from headway.launch.external import step_node
    from headway.launch.failure import run_as_rank
    from headway.launch.launcher import is_launched
    from headway.launch.nodes import parse_nodes
    from headway.launch.train import start_training, train_here
    from headway.runtime.process import end_with_supervisor

    # A supervisor that was killed must not leave a training behind which nobody watches.
    options = replace(options, json=json)
    end_with_supervisor()

    # Any other --resume is about the run of the recipe's name, which therefore keeps its name.
    makes_name = options.resume == "auto"

    if is_launched(os.environ):
        # A launcher of headway has put the name into the arguments; under torchrun or srun every
        # rank finds the same one.
        def train_as_rank() -> int:
            recipe = read_recipe(arguments, makes_name=makes_name)
            return train_here(recipe, options, print_json)

        exit_with(run_as_rank(train_as_rank))
        return

    # A dry run is how a recipe of somebody else is looked at, so it imports nothing unasked.
    if options.dry_run and not options.with_code and _print_foreign_code(arguments, json):
        return

    recipe = read_recipe(arguments, makes_tokenizer=True, makes_name=makes_name)
    # Under `srun headway train --nnodes N`, SLURM knows what the two options would say.
    if master is None and node_rank is None:
        slurm_node = step_node(nnodes, os.environ)
        if slurm_node is not None:
            node_rank, master = slurm_node
    nodes = parse_nodes(nnodes, node_rank or 0, master, node_timeout)
    launching = LaunchOptions(nproc, gpus, nodes)
    exit_with(start_training(recipe, arguments or [], options, launching, print_json))


def _print_foreign_code(arguments: list[str], json: bool) -> bool:
    """Before a dry run reads a recipe: list the code outside headway that it names; True if that
    code must be imported to go further.
    """
    from headway.config.external_code import find_external_code
    from headway.config.load import read_plain

    references = list(find_external_code(read_plain(*split_recipe(arguments))))
    # A program that the run calls later need not be imported to continue the dry run.
    stops = any(reference.is_imported for reference in references)
    if json and stops:
        print_json({"would_run": [str(reference) for reference in references]})
        return True
    for reference in references:
        typer.echo(f"a run of this recipe would run code outside of headway: {reference}", err=json)
    if stops:
        typer.echo(
            "nothing was imported or built; add --with-code to import it and continue the dry run"
        )
    return stops


def stop(
    run: Path = typer.Argument(..., metavar="RUN", help="Folder of a run that is training."),
    request: StopRequest = GROUP,
    json: bool = JSON,
) -> None:
    """Make a running training save a checkpoint and exit; all its ranks do so after the same step."""
    from headway.train.control import request_stop

    asked = request_stop(run, request)
    if json:
        print_json(asked)
        return

    action = "saves and exits"
    if request.save_only:
        action = "saves and continues"
    step = asked["step"]
    assert step is None or isinstance(step, int)
    # A step that is over already: the run saves as soon as it can.
    when = "after the current step"
    if request.at_step is not None and request.at_step > (step or 0):
        when = f"after step {request.at_step}"
    typer.echo(f"{run} {action} {when}; it was at step {asked['step']}")


VERBS = {"stop": stop, "train": train}

"""`headway train` and `headway stop`."""

import os
from pathlib import Path

import typer

from headway.cli._options import JSON, RECIPE, read_recipe, split_recipe
from headway.cli._output import exit_with, print_json

RESUME_HELP = "auto: resume from the run folder's newest checkpoint; never: start from scratch; or a checkpoint: a folder, a run or s3://bucket/prefix."
CODE_HELP = "With --dry-run: import your own modules that the recipe names; without it they are only listed and nothing is built."
GPUS_HELP = "GPUs: ids as in nvidia-smi (0,1), UUIDs, a type (A800), auto (all free ones) or none; default: run.gpus."


def train(
    arguments: list[str] = RECIPE,
    resume: str = typer.Option("auto", help=RESUME_HELP),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Build everything, run one step, report what would happen, write nothing.",
    ),
    with_code: bool = typer.Option(False, "--with-code", help=CODE_HELP),
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
    profile: bool = typer.Option(
        False,
        "--profile",
        help="Record some steps: a trace and a summary of each rank in the run's logs/.",
    ),
    profile_from: int | None = typer.Option(
        None, help="First step to record, counted from this start; default: 6."
    ),
    profile_steps: int | None = typer.Option(None, help="Steps to record; default: 3."),
    slow_ratio: float | None = typer.Option(
        None, help="Report a rank as slow if it takes this many times the mean; default: 1.1."
    ),
    json: bool = JSON,
) -> None:
    """Train from a recipe. Without one, data.train=FILE chooses it by what the file holds; without data too, the data is generated."""
    from headway.launch.external import step_node
    from headway.launch.failure import run_as_rank
    from headway.launch.launcher import LaunchOptions, is_launched
    from headway.launch.nodes import parse_nodes
    from headway.launch.train import TrainOptions, start_training, train_here
    from headway.runtime.process import end_with_supervisor

    numbers = {"first_step": profile_from, "num_steps": profile_steps, "ratio": slow_ratio}
    given = {name: value for name, value in numbers.items() if value is not None}
    options = TrainOptions(resume, dry_run, json, profile, given, with_code)
    options.check()
    end_with_supervisor()
    if is_launched(os.environ):
        # A launcher of headway has put the name into the arguments; under torchrun or srun every rank finds the same one.
        exit_with(
            run_as_rank(
                lambda: train_here(
                    read_recipe(arguments, makes_name=resume == "auto"), options, print_json
                )
            )
        )
    elif not (dry_run and not with_code and _print_foreign_code(arguments, json)):
        # --resume says what happens to the run of that name, so that it keeps its name.
        recipe = read_recipe(arguments, makes_tokenizer=True, makes_name=resume == "auto")
        if (
            master is None
            and node_rank is None
            and (found := step_node(nnodes, os.environ)) is not None
        ):
            node_rank, master = found
        launching = LaunchOptions(
            nproc, gpus, parse_nodes(nnodes, node_rank or 0, master, node_timeout)
        )
        exit_with(start_training(recipe, arguments or [], options, launching, print_json))


def _print_foreign_code(arguments: list[str], json: bool) -> bool:
    """Before a dry run reads a recipe: list the code outside headway that it names; True if that code must be imported to go further."""
    from headway.config.load import find_external_code, read_plain

    found = list(find_external_code(read_plain(*split_recipe(arguments))))
    stops = any(one.is_imported for one in found)
    if json and stops:
        print_json({"would_run": [str(one) for one in found]})
        return True
    for one in found:
        typer.echo(f"a run of this recipe would run code outside of headway: {one}", err=json)
    if stops:
        typer.echo(
            "nothing was imported or built; add --with-code to import it and continue the dry run"
        )
    return stops


def stop(
    run: Path = typer.Argument(..., metavar="RUN", help="Folder of a run that is training."),
    at_step: int | None = typer.Option(
        None, help="Stop after this step; default: after the current step."
    ),
    save_only: bool = typer.Option(
        False, "--save-only", help="Save a checkpoint and continue training."
    ),
    json: bool = JSON,
) -> None:
    """Make a running training save a checkpoint and exit; all its ranks do so after the same step."""
    from headway.train.control import StopRequest, request_stop

    asked = request_stop(run, StopRequest(at_step, save_only))
    if json:
        print_json(asked)
        return
    what = "saves and continues" if save_only else "saves and exits"
    step = asked["step"]
    assert step is None or isinstance(step, int)
    when = "after the current step"
    if at_step is not None and at_step > (step or 0):
        when = f"after step {at_step}"
    typer.echo(f"{run} {what} {when}; it was at step {asked['step']}")


VERBS = {"stop": stop, "train": train}

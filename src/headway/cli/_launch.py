"""What the verbs that submit a job share: the job of a command line, and following it to its end."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._complete import complete_recipe
from headway.cli._options import split_recipe
from headway.cli._output import exit_with, print_json
from headway.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from headway.launch.targets.base import Job, JobHandle, JobStatus, Target
    from headway.train.config import Recipe

log = logging.getLogger("headway")

JOB = typer.Argument(
    ...,
    metavar="RECIPE [section.key=value]...",
    help="A recipe and overrides.",
    autocompletion=complete_recipe,
)
DETACH = typer.Option(
    False,
    "--detach",
    help="Return when the job has started; follow it with `headway launch logs RUN --follow`.",
)
NPROC = typer.Option(None, help="Ranks on each node; default: one per GPU, else one.")


@dataclass(frozen=True)
class JobOptions:
    """What every target takes in addition to the recipe."""

    gpus: str | None = typer.Option(
        None, help="GPUs of each node: ids, UUIDs, a type, auto or none; default: run.gpus."
    )
    resume: str = typer.Option(
        "auto",
        help="auto: resume from the run folder's newest checkpoint; or a checkpoint to begin with.",
    )
    env: list[str] = typer.Option(
        [],
        "--env",
        metavar="NAME[=VALUE]",
        help="A variable for every rank; without a value, this shell's.",
    )

    def environment(self) -> dict[str, str]:
        """The variables of --env."""
        return self.named(self.env, "--env")

    @staticmethod
    def named(texts: Sequence[str], where: str) -> dict[str, str]:
        """NAME and NAME=VALUE as variables; one without a value must be set in this shell."""
        variables: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            # What shells accept as the name of a variable.
            if not (name.isidentifier() and name.isascii()):
                raise ConfigError(
                    f"{where} is {text[:80]!r}; it must be NAME or NAME=VALUE, e.g. "
                    "NCCL_DEBUG=INFO."
                )

            if equals:
                variables[name] = value
                continue
            if name not in os.environ:
                raise ConfigError(
                    f"{where} names {name}, which is not set in this shell. Set it, or give --env "
                    f"{name}=VALUE."
                )
            variables[name] = os.environ[name]
        return variables


def read_job(
    arguments: Sequence[str], options: JobOptions, nproc: int | None = None, nodes: int = 1
) -> tuple[Job, Recipe]:
    """The job of a command line and its recipe; every mistake in them is found here, before
    anything starts.
    """
    from headway.config.load import load
    from headway.config.shipped import find_recipe
    from headway.launch.targets.base import Job
    from headway.train.change import translate_key
    from headway.train.config import Recipe
    from headway.train.run_name import name_override, with_name

    path, overrides = split_recipe(arguments)
    if path is None:
        raise ConfigError("no recipe is given, and a job needs one. `headway init` writes one.")

    file = find_recipe(path, log.info)
    recipe = load(Recipe, file, overrides, log.info, translate_key)

    # The name is chosen once, here. Hosts that chose it themselves might choose another folder:
    # by then the run of this name exists. A checkpoint to begin with keeps the recipe's name.
    if options.resume == "auto":
        recipe = with_name(recipe, file, overrides, log.info)
        overrides = [*overrides, name_override(recipe)]

    job = Job(
        file,
        recipe.run.folder,
        tuple(overrides),
        nodes,
        nproc,
        options.gpus,
        options.resume,
        options.environment(),
    )
    return job, recipe


def follow_job(target: Target, handle: JobHandle, *, detach: bool, json: bool) -> None:
    """Follow a job that was submitted to its end, or with `--detach` say how to; the exit code is
    the job's.
    """
    from headway.launch.attach import attach

    if detach:
        if json:
            print_json(describe_job(handle, target.status(handle)))
        else:
            typer.echo(f"started; follow it with `headway launch logs {handle.run_dir} --follow`")
        return

    # Lines of the job go to standard error: with --json, standard output is one JSON document.
    status = attach(target, handle, lambda line: typer.echo(line, err=True))
    if json:
        print_json(describe_job(handle, status))
    if status.state == "unknown":
        raise LaunchError(status.message)

    # A job that was killed from outside has failed without an exit code of its own.
    if status.exit_code is not None:
        exit_with(status.exit_code)
    elif status.state == "failed":
        exit_with(1)


def describe_job(handle: JobHandle, status: JobStatus) -> dict[str, Any]:
    """A job for --json."""
    return {
        "run": str(handle.run_dir),
        "target": handle.kind,
        "ids": dict(handle.ids),
        **asdict(status),
    }

"""`headway train`."""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._output import JSON_FLAG, print_json
from headway.cli._recipe import RECIPE_ARGUMENT

if TYPE_CHECKING:
    from headway.launch.local import Job
    from headway.train.config import Recipe

RESUME_HELP = (
    "auto: continue the run folder's newest checkpoint; never: begin anew; or a checkpoint: a folder, a run or s3://bucket/prefix."
)
PROFILE_FLAGS = {"first_step": "--profile-from", "num_steps": "--profile-steps", "ratio": "--slow-ratio"}
CODE_HELP = "With --dry-run: import the modules of yours that the recipe names; without it they are listed and nothing is built."
GPUS_HELP = "GPUs: ids as nvidia-smi has them (0,1), UUIDs, a type (A800), auto (all free ones) or none; default: run.gpus."


@dataclass(frozen=True)
class Options:
    """What every rank is told."""

    resume: str
    dry_run: bool
    json: bool
    profile: bool
    numbers: dict[str, Any]
    """What was said about the profile."""
    with_code: bool = False
    """Settled before ranks start, so no flag of theirs."""

    def check(self) -> None:
        """Refuse what would have no effect."""
        from headway.errors import ConfigError

        if self.with_code and not self.dry_run:
            raise ConfigError("--with-code is given without --dry-run; a run always runs the code that its recipe names. Leave it out.")
        if self.numbers and not self.profile:
            raise ConfigError(f"{PROFILE_FLAGS[next(iter(self.numbers))]} is given without --profile. Add --profile, or leave it out.")
        if self.profile and self.dry_run:
            raise ConfigError("--profile is given with --dry-run, which writes nothing. Leave one of them out.")

    def flags(self) -> list[str]:
        """As they stand on a command line."""
        switches = {"--dry-run": self.dry_run, "--json": self.json, "--profile": self.profile}
        numbers = [text for name, value in self.numbers.items() for text in (PROFILE_FLAGS[name], str(value))]
        return ["--resume", self.resume, *(flag for flag, on in switches.items() if on), *numbers]


def command(
    arguments: list[str] = RECIPE_ARGUMENT,
    resume: str = typer.Option("auto", help=RESUME_HELP),
    dry_run: bool = typer.Option(False, "--dry-run", help="Build everything, run one step, say what would happen, write nothing."),
    with_code: bool = typer.Option(False, "--with-code", help=CODE_HELP),
    nproc: int | None = typer.Option(None, help="Ranks to start on this machine; default: one per chosen GPU, else one."),
    gpus: str | None = typer.Option(None, help=GPUS_HELP),
    nnodes: int = typer.Option(1, help="Machines of the run; start the same command on each with its own --node-rank."),
    node_rank: int = typer.Option(0, help="Which of the machines this is, from 0."),
    master: str | None = typer.Option(None, metavar="HOST:PORT", help="Where machine 0 listens; the same on all."),
    node_timeout: float = typer.Option(300.0, help="Seconds to wait for the other machines."),
    profile: bool = typer.Option(False, "--profile", help="Record some steps: a trace and a summary of each rank in the run's logs/."),
    profile_from: int | None = typer.Option(None, help="First step to record, counted from this start; default: 6."),
    profile_steps: int | None = typer.Option(None, help="Steps to record; default: 3."),
    slow_ratio: float | None = typer.Option(None, help="A rank is called slow if it takes this many times the mean; default: 1.1."),
    json: bool = JSON_FLAG,
) -> None:
    """Train from a recipe. Without a recipe a small model trains on generated data."""
    from headway.cli._recipe import read_recipe
    from headway.errors import LaunchError
    from headway.launch.local import Wishes, is_launched, plan_job
    from headway.launch.nodes import LOOPBACK, Nodes, parse_master
    from headway.runtime.process import end_with_supervisor, from_environment, set_environment, supervisor
    from headway.runtime.run_lock import refuse_live

    wanted = {"first_step": profile_from, "num_steps": profile_steps, "ratio": slow_ratio}
    options = Options(resume, dry_run, json, profile, {name: value for name, value in wanted.items() if value is not None}, with_code)
    options.check()
    end_with_supervisor()
    if dry_run and not with_code and not is_launched(os.environ) and _names_code(arguments, json):
        return
    if is_launched(os.environ):
        as_rank(lambda: work(arguments, options))
        return
    recipe = read_recipe(arguments)
    if not dry_run and node_rank == 0 and from_environment().is_first:
        refuse_live(recipe.run.folder)  # already here, before a supervisor or a launcher writes anything
    if recipe.run.supervise and not dry_run and supervisor() is None:
        _leave(_supervised(recipe))
        return
    if master is not None and nnodes == 1:
        raise LaunchError("--master is given and --nnodes is 1; one machine needs no meeting point. Leave it out, or give --nnodes.")
    host, port = parse_master(master) if master is not None else (LOOPBACK, 0)
    job = plan_job(recipe, Wishes(nproc, gpus, Nodes(nnodes, node_rank, host, port, node_timeout)), os.environ)
    _log_choice(job)
    if job.needs_launcher:
        given = {"--nproc": nproc, "--gpus": gpus, "--nnodes": None if nnodes == 1 else nnodes}
        told = [
            text for flag, value in given.items() if value is not None for text in (flag, str(value))
        ]  # the run folder keeps the command
        code = _launched(job, recipe, ["train", *(arguments or []), *options.flags(), *told])
    else:
        from headway.launch.outer import meeting_point

        set_environment({**(job.choice.environment if job.choice is not None else {}), **meeting_point(os.environ)})
        code = work(arguments, options)
    _leave(code)


def _log_choice(job: "Job") -> None:
    """What was found out about the GPUs."""
    log = logging.getLogger("headway")
    for note in job.choice.notes if job.choice is not None else ():
        log.info("%s", note)
    for warning in job.choice.warnings if job.choice is not None else ():
        log.warning("%s", warning)


def _names_code(arguments: list[str], json: bool) -> bool:
    """Before a dry run reads a recipe: say which code of somebody else's it names, and whether that must be imported to go further."""
    from headway.cli._recipe import parts_of
    from headway.config.load import read_plain
    from headway.config.outside_code import outside_code

    found = list(outside_code(read_plain(*parts_of(arguments))))
    stops = any(one.is_imported for one in found)
    if json and stops:
        print_json({"would_run": [str(one) for one in found]})
        return True
    for one in found:
        typer.echo(f"a run of this recipe would run code outside of headway: {one}", err=json)
    if stops:
        typer.echo("nothing was imported or built; with --with-code the dry run imports it and goes on")
    return stops


def _launched(job: "Job", recipe: "Recipe", line: list[str]) -> int:
    """Start ranks and wait for them; their crash is told here, because only here all of them are seen."""
    from headway.launch.failure import RankError
    from headway.launch.local import launch
    from headway.launch.trouble import tell_failure

    level = logging.getLevelName(logging.getLogger("headway").level)
    try:
        return launch(job, line, recipe.run.folder / "logs", {**os.environ, "LOG_LEVEL": level})
    except RankError as error:
        tell_failure(recipe, error)
        raise


def _supervised(recipe: "Recipe") -> int:
    """Start this very command again under a supervisor."""
    from headway.cli.supervise import supervise
    from headway.errors import LaunchError
    from headway.launch.local import outer_launcher
    from headway.runtime.process import own_command

    if (outer := outer_launcher(os.environ)) is not None:
        raise LaunchError(f"run.supervise is true and {outer} started this process. Put `headway supervise --` in front of {outer}.")
    return supervise(own_command(sys.argv[1:]), recipe.supervise, recipe)


def _leave(code: int) -> None:
    if code:
        raise typer.Exit(code)


def work(arguments: list[str], options: Options) -> int:
    """Train in this process, as one rank or alone; returns the exit code."""
    from contextlib import nullcontext

    from headway.cli._recipe import read_recipe
    from headway.diagnose.profile import plan_profile, profiled
    from headway.runtime.output import OutputError
    from headway.runtime.process import from_environment, kill_at_step, set_environment
    from headway.train import dry_run as try_recipe
    from headway.train.session import run_recipe
    from headway.workflows.resume_proof import killed_at

    recipe = read_recipe(arguments)
    if options.profile:
        set_environment({"KINETO_LOG_LEVEL": "99"})  # read when torch loads; else the profiler announces itself on the screen
    plan = plan_profile(**options.numbers)
    if options.profile and recipe.steps is not None and not recipe.stages:
        plan.fit(recipe.steps)  # already here, where nothing is written yet; a run that goes on has fewer and is looked at again
    probe = profiled(plan) if options.profile else nullcontext
    if (step := kill_at_step()) is not None:
        probe = killed_at(step)
    outcome: dict[str, Any] = try_recipe(recipe, resume=options.resume) if options.dry_run else run_recipe(recipe, options.resume, probe)
    if options.json and from_environment().is_first:
        try:
            print_json(outcome)
        except OutputError as problem:  # training is done and saved; its exit code says so
            logging.getLogger("headway").warning("%s", problem)
    return outcome.get("exit_code", 0)


def as_rank(function: Callable[[], int]) -> None:
    """Run as a child of the launcher: end when it ends, and tell it why this rank fails instead of printing it beside the other ranks."""
    from headway.launch.failure import report_failure
    from headway.runtime.output import flush_streams
    from headway.runtime.process import end_with_launcher, failure_file

    end_with_launcher()
    reason = failure_file()
    assert reason is not None
    try:
        code = function()
    except Exception as error:  # it is not swallowed: the launcher prints it
        code = report_failure(reason, error)
        # At once, because threads of a broken process group may keep the interpreter from ending.
        flush_streams()
        os._exit(code)
    if code:
        raise typer.Exit(code)

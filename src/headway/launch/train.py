"""One call of `headway train`: under a supervisor, as the launcher of several ranks, or as a rank itself.

In: a recipe, the options of the command line. Out: an exit code; on the first rank the summary goes to `show`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, LaunchError
from headway.launch.external import external_launcher
from headway.launch.failure import RankError, report_crash
from headway.launch.launcher import (
    LaunchOptions,
    LaunchSpec,
    RunPlace,
    launch,
    logging_environment,
    plan_for_recipe,
)
from headway.launch.supervise import supervise
from headway.runtime.output import OutputError
from headway.runtime.process import (
    from_environment,
    headway_command,
    kill_at_step,
    set_environment,
    supervisor,
)
from headway.runtime.run_lock import refuse_live
from headway.train.run_name import name_override

if TYPE_CHECKING:
    from headway.diagnose.profile import ProfilePlan
    from headway.train.config import Recipe
    from headway.train.run import Run

PROFILE_FLAGS = {
    "first_step": "--profile-from",
    "num_steps": "--profile-steps",
    "ratio": "--slow-ratio",
}
Show = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainOptions:
    """What every rank needs in addition to the recipe."""

    resume: str = "auto"
    dry_run: bool = False
    json: bool = False
    profile: bool = False
    profile_numbers: dict[str, Any] = field(default_factory=dict)
    """The given ones of `PROFILE_FLAGS`."""
    with_code: bool = False
    """Decided before ranks start, so ranks get no such flag."""

    def check(self) -> None:
        """Refuse options that would have no effect."""
        if self.with_code and not self.dry_run:
            raise ConfigError(
                "--with-code is given without --dry-run; a run always runs the code that its recipe names. Leave it out."
            )
        if self.profile_numbers and not self.profile:
            flag = PROFILE_FLAGS[next(iter(self.profile_numbers))]
            raise ConfigError(f"{flag} is given without --profile. Add --profile, or leave it out.")
        if self.profile and self.dry_run:
            raise ConfigError(
                "--profile is given with --dry-run, which writes nothing. Leave one of them out."
            )

    def flags(self) -> list[str]:
        """The options on a command line."""
        switches = {"--dry-run": self.dry_run, "--json": self.json, "--profile": self.profile}
        numbers = [
            text
            for name, value in self.profile_numbers.items()
            for text in (PROFILE_FLAGS[name], str(value))
        ]
        return ["--resume", self.resume, *(flag for flag, on in switches.items() if on), *numbers]


def start_training(
    recipe: Recipe,
    arguments: Sequence[str],
    options: TrainOptions,
    launching: LaunchOptions,
    show: Show,
) -> int:
    """Train a recipe, which `arguments` describe on the command line; returns the exit code."""
    nodes = launching.nodes
    if not options.dry_run and nodes.rank == 0 and from_environment().is_first:
        refuse_live(recipe.run.folder)  # before a supervisor or a launcher writes anything
    if recipe.run.supervise and not options.dry_run and supervisor() is None:
        return _start_supervised(recipe)
    spec = plan_for_recipe(recipe, launching, os.environ)
    spec.log_choice()
    if not spec.needs_launcher:
        spec.enter(os.environ)
        return train_here(recipe, options, show)
    given = {
        "--nproc": launching.nproc,
        "--gpus": launching.gpus,
        "--nnodes": None if nodes.num == 1 else nodes.num,
    }
    flags = [
        text for flag, value in given.items() if value is not None for text in (flag, str(value))
    ]  # the run folder records them
    return _launch(
        spec, recipe, ["train", *arguments, name_override(recipe), *options.flags(), *flags]
    )


def _start_supervised(recipe: Recipe) -> int:
    """Start this same command again under a supervisor."""
    if (external := external_launcher(os.environ)) is not None:
        raise LaunchError(
            f"run.supervise is true and {external} started this process. Put `headway supervise --` in front of {external}."
        )
    return supervise(
        headway_command([*sys.argv[1:], name_override(recipe)]), recipe.supervise, recipe
    )


def _launch(spec: LaunchSpec, recipe: Recipe, line: list[str]) -> int:
    """Start ranks and wait for them. A crash is reported here: only the launcher sees all ranks."""
    try:
        place = RunPlace(recipe.run.folder, {"the recipe": recipe_digest(recipe)})
        return launch(spec, line, recipe.run.folder / "logs", logging_environment(), place)
    except RankError as error:
        report_crash(recipe, error)
        raise


def recipe_digest(recipe: Recipe) -> str:
    """Changes with the settings that must be equal on all nodes; folders on their disks and what only the first rank reads may differ."""
    own = {
        "run": True,
        "log": True,
        "track": True,
        "supervise": True,
        "data": {"cache_dir", "stage_to"},
    }
    return hashlib.sha256(recipe.model_dump_json(exclude=own).encode()).hexdigest()[:12]


def train_here(recipe: Recipe, options: TrainOptions, show: Show) -> int:
    """Train in this process, as one rank or alone; returns the exit code."""
    from headway.diagnose.profile import plan_profile
    from headway.train import dry_run
    from headway.train.next_steps import next_lines
    from headway.train.session import run_recipe

    if options.profile:
        set_environment(
            {"KINETO_LOG_LEVEL": "99"}
        )  # read when torch loads; else the profiler prints a greeting
    plan = plan_profile(**options.profile_numbers)
    if options.profile and recipe.steps is not None and not recipe.stages:
        plan.fit(
            recipe.steps
        )  # before anything is written; a resumed run has fewer steps left and is checked again
    hook = profiled(plan) if options.profile else nullcontext
    if (step := kill_at_step()) is not None:
        hook = kill_after(step)
    outcome: dict[str, Any] = (
        dry_run(recipe, resume=options.resume)
        if options.dry_run
        else run_recipe(recipe, options.resume, hook)
    )
    if not options.json and not options.dry_run and from_environment().is_first:
        for line in next_lines(outcome):
            logging.getLogger("headway").info("%s", line)
    if options.json and from_environment().is_first:
        try:
            show(outcome)
        except (
            OutputError
        ) as problem:  # training is done and saved, so the exit code is that of success
            logging.getLogger("headway").warning("%s", problem)
    return outcome.get("exit_code", 0)


def profiled(plan: ProfilePlan) -> Callable[[Run], Any]:
    """A hook that records the steps of the plan."""

    @contextmanager
    def hook(run: Run) -> Iterator[None]:
        from headway.diagnose.profile import ProfileTarget, Recorder

        plan.fit(run.total_steps - run.state.step)
        report = partial(run.emit, "slow_rank")
        target = ProfileTarget(
            run.process,
            run.compute,
            run.start.folder / "logs",
            run.ranks.world,
            report,
            run.meter.interrupt,
        )
        recorder = Recorder(target, plan)
        with recorder.profiler:
            run.on_step(recorder.after_step)
            yield

    return hook


def kill_after(step: int) -> Callable[[Run], Any]:
    """A hook for `headway verify resume`: the last rank kills itself with SIGKILL after this step and the pending save."""

    @contextmanager
    def hook(run: Run) -> Iterator[None]:
        before = 0 if run.stage is None else run.stage.steps_before

        def after_step(done: int) -> None:
            if before + done < step:
                return
            run.saver.wait()
            run.ranks.world.max(0)  # the first rank completes the checkpoint
            if run.process.rank == run.process.world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        run.on_step(after_step)
        yield

    return hook

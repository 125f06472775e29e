"""One call of `headway train`: under a supervisor, as the launcher of several ranks, or as a rank
itself.

In: a recipe, the options of the command line. Out: an exit code; on the first rank the summary goes
to `show`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from headway.errors import LaunchError
from headway.launch.external import external_launcher
from headway.launch.failure import RankError, report_crash
from headway.launch.launcher import (
    LaunchSpec,
    RunPlace,
    launch,
    logging_environment,
    plan_for_recipe,
)
from headway.launch.options import LaunchOptions, TrainOptions
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

Show = Callable[[dict[str, Any]], None]
"""Prints the summary of a run."""


def start_training(
    recipe: Recipe,
    arguments: Sequence[str],
    options: TrainOptions,
    launching: LaunchOptions,
    show: Show,
) -> int:
    """Train a recipe, which `arguments` describe on the command line; returns the exit code."""
    nodes = launching.nodes
    # Before a supervisor or a launcher writes anything.
    if not options.dry_run and nodes.rank == 0 and from_environment().is_first:
        refuse_live(recipe.run.folder)

    # Under a supervisor this same command runs again, and `supervisor()` names it.
    if recipe.run.supervise and not options.dry_run and supervisor() is None:
        return _start_supervised(recipe)

    spec = plan_for_recipe(recipe, launching, os.environ)
    spec.log_choice()
    if not spec.needs_launcher:
        spec.enter(os.environ)
        return train_here(recipe, options, show)

    # Ranks need none of these options. They get them because the run folder records its command.
    flags: list[str] = []
    if launching.nproc is not None:
        flags += ["--nproc", str(launching.nproc)]
    if launching.gpus is not None:
        flags += ["--gpus", launching.gpus]
    if nodes.num != 1:
        flags += ["--nnodes", str(nodes.num)]
    words = ["train", *arguments, name_override(recipe), *options.flags(), *flags]
    return _launch(spec, recipe, words)


def _start_supervised(recipe: Recipe) -> int:
    """Start this same command again under a supervisor."""
    if (external := external_launcher(os.environ)) is not None:
        raise LaunchError(
            f"run.supervise is true and {external} started this process. "
            f"Put `headway supervise --` in front of {external}."
        )
    from headway.launch.supervise import supervise

    # The name is settled now: every restart must find the same run folder.
    command = headway_command([*sys.argv[1:], name_override(recipe)])
    return supervise(command, recipe.supervise, recipe)


def _launch(spec: LaunchSpec, recipe: Recipe, line: list[str]) -> int:
    """Start ranks and wait for them. A crash is reported here: only the launcher sees all ranks."""
    try:
        run_place = RunPlace(recipe.run.folder, {"the recipe": recipe_digest(recipe)})
        return launch(spec, line, recipe.run.folder / "logs", logging_environment(), run_place)
    except RankError as error:
        report_crash(recipe, error)
        raise


def recipe_digest(recipe: Recipe) -> str:
    """Changes with the settings that must be equal on all nodes.

    Folders on their disks and what only the first rank reads may differ.
    """
    machine_settings = {
        "run": True,
        "log": True,
        "track": True,
        "supervise": True,
        "data": {"cache_dir", "stage_to"},
    }
    return hashlib.sha256(recipe.model_dump_json(exclude=machine_settings).encode()).hexdigest()[
        :12
    ]


def train_here(recipe: Recipe, options: TrainOptions, show: Show) -> int:
    """Train in this process, as one rank or alone; returns the exit code."""
    from headway.diagnose.profile import plan_profile
    from headway.train import dry_run
    from headway.train.next_steps import next_lines
    from headway.train.session import run_recipe
    from headway.train.start_time import StartTime

    hook: Callable[[Run], Any] = nullcontext
    if options.profile:
        # Read when torch loads; otherwise the profiler prints a greeting.
        set_environment({"KINETO_LOG_LEVEL": "99"})
        plan = plan_profile(**options.profile_numbers())
        # Before anything is written. A resumed run has fewer steps left: the hook checks again.
        if recipe.steps is not None and not recipe.stages:
            plan.fit(recipe.steps)
        hook = profiled(plan)
    if (step := kill_at_step()) is not None:
        hook = kill_after(step)

    if options.dry_run:
        outcome: dict[str, Any] = dry_run(recipe, resume=options.resume)
    else:
        outcome = run_recipe(recipe, options.resume, hook, start_time=StartTime.of_program())

    is_first = from_environment().is_first
    if not options.json and not options.dry_run and is_first:
        for line in next_lines(outcome):
            logging.getLogger("headway").info("%s", line)
    if options.json and is_first:
        try:
            show(outcome)
        except OutputError as problem:
            # Training is done and saved, so the exit code is that of success.
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
    """A hook for `headway verify resume`: the last rank kills itself with SIGKILL after this step
    and the pending save.
    """

    @contextmanager
    def hook(run: Run) -> Iterator[None]:
        # `step` counts over all stages of the run.
        before = 0 if run.stage is None else run.stage.steps_before

        def after_step(done: int) -> None:
            if before + done < step:
                return
            # A barrier after the wait: the first rank completes the checkpoint for all.
            run.saver.wait()
            run.ranks.world.max(0)
            if run.process.rank == run.process.world - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        run.on_step(after_step)
        yield

    return hook

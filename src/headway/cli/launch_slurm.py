"""`headway launch slurm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from headway.cli._launch import JOB, JobOptions, describe_job, read_job
from headway.cli._options import GROUP, JSON
from headway.cli._output import print_json
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.train.config import Recipe
    from headway.train.slurm_config import SlurmConfig

ARRAY_HELP = (
    'One job per set of overrides, each in run folder RUN/K: "optim.lr=1e-3 seed=1", or a file '
    "with a set per line; repeatable."
)


@dataclass(frozen=True)
class SlurmOptions:
    """What is asked of SLURM; each overrides the setting of launch.slurm with the same name."""

    nodes: int | None = typer.Option(None, help="Number of nodes.")
    gpus_per_node: str | None = typer.Option(
        None, help="GPUs of each node, e.g. 8 or h100:8; one rank for each."
    )
    nproc: int | None = typer.Option(None, help="Ranks on each node; default: one per GPU, or one.")
    time: str | None = typer.Option(None, help="Time limit, e.g. 48:00:00 or 2-00:00:00.")
    partition: str | None = typer.Option(None, "--partition", "-p", help="Partition.")
    account: str | None = typer.Option(None, "--account", "-A", help="Account that is charged.")
    qos: str | None = typer.Option(None, help="Quality of service.")
    cpus: int | None = typer.Option(None, "--cpus-per-task", help="CPU cores of each node.")
    mem: str | None = typer.Option(None, help="Memory of each node, e.g. 500G.")
    sbatch: list[str] = typer.Option(
        [],
        "--sbatch",
        metavar="KEY[=VALUE]",
        help="A further option of sbatch, e.g. constraint=h100.",
    )

    def settings(self, recipe: Recipe) -> SlurmConfig:
        """The settings of the recipe with these on top, checked."""
        from headway.config.load import validate
        from headway.train.config import Recipe

        recipe_settings = recipe.launch.slurm.model_dump(mode="json")
        option_settings = {
            name: value
            for name, value in vars(self).items()
            if name != "sbatch" and value is not None
        }

        # Further options of sbatch add to those of the recipe; all others replace them.
        sbatch = [
            *recipe_settings["sbatch"],
            *(option.removeprefix("--") for option in self.sbatch),
        ]
        data = {**recipe_settings, **option_settings, "sbatch": sbatch}

        # As part of a recipe, so that a mistake is named by its key: launch.slurm.time.
        return validate(Recipe, {"launch": {"slurm": data}}).launch.slurm


def slurm(
    arguments: list[str] = JOB,
    asked: SlurmOptions = GROUP,
    options: JobOptions = GROUP,
    array: list[str] = typer.Option([], metavar="OVERRIDES|FILE", help=ARRAY_HELP),
    at_once: int | None = typer.Option(
        None, min=1, help="With --array: how many may run at the same time."
    ),
    chain: bool = typer.Option(
        False, "--chain", help="A recipe with stages: one job per stage, each after the one before."
    ),
    after: str | None = typer.Option(
        None,
        metavar="JOB|RUN",
        help="Begin when this job has ended well: a job id, or its run folder.",
    ),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Check everything and print the script; nothing is written or queued.",
    ),
    json: bool = JSON,
) -> None:
    """Train as a SLURM job: it saves before its time limit, is queued again and resumes. Returns when the job is queued."""
    from headway.launch.slurm_plan import Submission, plan_submission, read_elements
    from headway.launch.targets.slurm import SlurmTarget, find_job

    job, recipe = read_job(arguments, options)
    if at_once is not None and not array:
        raise ConfigError("--at-once is given without --array. Leave it out.")

    earlier_job = None
    if after is not None:
        earlier_job = find_job(after)
    submission = Submission(
        asked.settings(recipe), read_elements(array), at_once, chain, earlier_job
    )
    plan = plan_submission(job, submission)

    if dry_run:
        if json:
            print_json(
                {
                    "run": str(plan.run_dir),
                    "script": plan.text,
                    "files": sorted(map(str, plan.files)),
                    "jobs": len(plan.jobs),
                }
            )
        else:
            typer.echo(plan.text, nl=False)
        return

    target = SlurmTarget(submission)
    handle = target.submit_plan(plan, job)
    if json:
        print_json(describe_job(handle, target.status(handle)))
        return
    # Elements of an array are 123_0, 123_1, ...: one job. Stages of a chain are several.
    ids = ", ".join(
        dict.fromkeys(queued["job"].partition("_")[0] for queued in handle.options["jobs"])
    )
    count = ""
    if plan.elements:
        count = f" with {len(plan.elements)} elements"
    status = f"`headway launch status {job.run_dir}`"
    typer.echo(
        f"queued as job {ids}{count}; where it is: {status}, what it prints: `headway launch logs "
        f"{job.run_dir}`"
    )


VERBS = {"launch slurm": slurm}

"""From a recipe to what is submitted: the files of a job and its sbatch calls, made before anything is written.

    one job        RUN/launch/recipe.yaml                            sbatch job.sh
    --array        RUN/launch/recipe-K.yaml, run folder RUN/K        sbatch job.sh, with --array in the script
    --chain        RUN/launch/recipe-stage-K.yaml: the first K stages   sbatch job.sh FILE for each, afterok of the one before

The recipe is resolved here and kept as a file: changing the original while the job waits in the queue changes nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.config.load import dump_yaml, load
from headway.errors import ConfigError
from headway.launch.slurm_record import FOLDER
from headway.launch.slurm_script import SCRIPT, ScriptParts, check_paths, write_script
from headway.launch.targets.base import Job
from headway.train.check import check_for_ranks
from headway.train.config import Recipe
from headway.train.slurm_config import SlurmConfig

MAX_ELEMENTS = 1000


@dataclass(frozen=True)
class Submission:
    """How a job is submitted."""

    settings: SlurmConfig = field(default_factory=SlurmConfig)
    elements: tuple[tuple[str, ...], ...] = ()
    """Overrides of each element of an array; none = no array."""
    at_once: int | None = None
    chain: bool = False
    """One job for each stage, each after the one before."""
    after: str | None = None
    """Begin when this job has ended well."""


@dataclass(frozen=True)
class PlannedJob:
    """One job id to be: its run folder, what it is called, and the further words of its sbatch call."""

    run_dir: Path
    label: str = ""
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class SubmitPlan:
    """Everything that is written and submitted."""

    run_dir: Path
    script: Path
    files: dict[Path, str]
    jobs: tuple[PlannedJob, ...]
    """Submitted in this order, each after the one before."""
    elements: tuple[PlannedJob, ...] = ()
    after: str | None = None

    @property
    def text(self) -> str:
        """The script."""
        return self.files[self.script]


def plan_submission(job: Job, how: Submission) -> SubmitPlan:
    """Check the recipe of a job, and plan its files; nothing is written."""
    run_dir, here = Path(os.path.abspath(job.run_dir)), Path.cwd()
    check_paths([run_dir, here])
    settings, launch = _settings(job, how.settings), run_dir / FOLDER
    recipe = load(Recipe, job.recipe, job.overrides)
    world = settings.nodes * settings.ranks
    if how.elements and how.chain:
        raise ConfigError(
            "--array and --chain are both given; an array trains several recipes, a chain the stages of one. Leave one out."
        )
    if how.chain and len(recipe.stages) < 2:
        raise ConfigError(
            f"--chain is given; {job.recipe} has {len(recipe.stages) or 'no'} stages, and a chain needs two. Leave it out."
        )
    files: dict[Path, str] = {}
    jobs, elements = (PlannedJob(run_dir),), list[PlannedJob]()
    if how.elements:
        for at, one in enumerate(_elements(job, how.elements, run_dir)):
            _check(one, world, f"--array element {at}: ")
            files[launch / f"recipe-{at}.yaml"] = dump_yaml(one, only_given=True)
            elements.append(PlannedJob(run_dir / str(at), " ".join(how.elements[at])))
    else:
        check_for_ranks(recipe, world)
        files[launch / "recipe.yaml"] = dump_yaml(recipe, only_given=True)
    if how.chain:
        jobs = tuple(_chain(recipe, run_dir, files))
    words = ([] if job.resume == "auto" else ["--resume", job.resume]) + (
        [] if job.gpus is None else ["--gpus", job.gpus]
    )
    count = len(elements) or None
    parts = ScriptParts(settings, recipe.run.name, run_dir, here, tuple(words), count, how.at_once)
    files[launch / SCRIPT] = write_script(parts)
    return SubmitPlan(run_dir, launch / SCRIPT, files, jobs, tuple(elements), how.after)


def _settings(job: Job, settings: SlurmConfig) -> SlurmConfig:
    """The settings with what the job itself says on top."""
    given = {"nodes": None if job.num_nodes == 1 else job.num_nodes, "nproc": job.ranks_per_node}
    changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    return settings.model_copy(update={**changes, "setup": (*settings.setup, *job.setup)})


def _check(recipe: Recipe, world: int, prefix: str) -> None:
    try:
        check_for_ranks(recipe, world)
    except ConfigError as problem:
        raise ConfigError(f"{prefix}{problem}") from None


def _elements(job: Job, elements: Sequence[Sequence[str]], run_dir: Path) -> list[Recipe]:
    if len(elements) > MAX_ELEMENTS:
        raise ConfigError(
            f"--array has {len(elements)} elements; SLURM takes {MAX_ELEMENTS} by default. Split it."
        )
    found: list[Recipe] = []
    for at, overrides in enumerate(elements):
        if wrong := next(
            (one for one in overrides if one.startswith(("run.name=", "run.dir="))), None
        ):
            raise ConfigError(
                f"--array element {at} has {wrong}; each element has its own run folder, {run_dir}/{at}. Leave it out."
            )
        try:
            found.append(
                load(
                    Recipe,
                    job.recipe,
                    [*job.overrides, *overrides, f"run.dir={run_dir}", f'run.name="{at}"'],
                )
            )
        except ConfigError as problem:
            raise ConfigError(f"--array element {at}: {problem}") from None
    return found


def _chain(recipe: Recipe, run_dir: Path, files: dict[Path, str]) -> list[PlannedJob]:
    """A job for each stage: it trains the recipe's stages up to its own, of which the earlier ones are done."""
    found: list[PlannedJob] = []
    for number, stage in enumerate(recipe.stages, 1):
        path = run_dir / FOLDER / f"recipe-stage-{number}.yaml"
        files[path] = dump_yaml(
            recipe.model_copy(update={"stages": recipe.stages[:number]}), only_given=True
        )
        found.append(PlannedJob(run_dir, stage.name, (str(path),)))
    return found


def read_elements(given: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The override sets of `--array`: each a text of key=value words, or a file with one set per line."""
    lines: list[str] = []
    for text in given:
        path = Path(text)
        if "=" not in text or path.is_file():
            try:
                lines += path.read_text(encoding="utf-8").splitlines()
            except (OSError, ValueError) as problem:
                raise ConfigError(
                    f"--array is {text[:200]!r}; neither key=value words nor a readable file: {problem}."
                ) from None
        else:
            lines.append(text)
    sets: list[tuple[str, ...]] = []
    for line in lines:
        try:
            words = tuple(shlex.split(line, comments=True))
        except ValueError as problem:
            raise ConfigError(
                f"--array has {line[:200]!r}, which cannot be split into words: {problem}."
            ) from None
        if wrong := next((word for word in words if "=" not in word), None):
            raise ConfigError(
                f'--array has {wrong[:200]!r}; each word must be key=value, e.g. "optim.lr=3e-4 seed=1".'
            )
        sets += [words] if words else []
    if given and not sets:
        raise ConfigError(
            '--array has no override sets. Give each as "key=value key=value", or a file with one per line.'
        )
    return tuple(sets)

"""From a recipe to what is submitted: the files of a job and its sbatch calls, made before anything
is written.

    one job   RUN/launch/recipe.yaml
              sbatch job.sh
    --array   RUN/launch/recipe-K.yaml, run folder RUN/K
              sbatch job.sh, with --array in the script
    --chain   RUN/launch/recipe-stage-K.yaml: the first K stages
              sbatch job.sh FILE for each, afterok of the one before

The recipe is resolved here and kept as a file: changing the original while the job waits in the
queue changes nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.config.load import dump_yaml, load
from headway.config.regular_file import regular_only
from headway.errors import ConfigError
from headway.launch.slurm_record import FOLDER
from headway.launch.slurm_script import SCRIPT, ScriptParts, check_paths, write_script
from headway.launch.targets.base import Job
from headway.train.check import check_for_ranks
from headway.train.config import Recipe
from headway.train.slurm_config import SlurmConfig

MAX_ELEMENTS = 1000
"""SLURM's default of MaxArraySize is 1001, the first index that it refuses."""


@dataclass(frozen=True)
class Submission:
    """How a job is submitted."""

    settings: SlurmConfig = field(default_factory=SlurmConfig)
    elements: tuple[tuple[str, ...], ...] = ()
    """Overrides of each element of an array; none = no array."""
    at_once: int | None = None
    """How many elements may run at the same time; None = all."""
    chain: bool = False
    """One job for each stage, each after the one before."""
    after: str | None = None
    """Begin when this job has ended well."""


@dataclass(frozen=True)
class PlannedJob:
    """One job id to be: its run folder, what it is called, and the further words of its sbatch
    call.
    """

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
    run_dir = Path(os.path.abspath(job.run_dir))
    working_dir = Path.cwd()
    check_paths([run_dir, working_dir])
    # Everything that can be refused is refused here, not after days in the queue.
    settings = _settings(job, how.settings)
    launch = run_dir / FOLDER
    recipe = load(Recipe, job.recipe, job.overrides)
    world = settings.nodes * settings.ranks
    if how.elements and how.chain:
        raise ConfigError(
            "--array and --chain are both given; an array trains several recipes, a chain the "
            "stages of one. Leave one out."
        )
    if how.chain and len(recipe.stages) < 2:
        raise ConfigError(
            f"--chain is given; {job.recipe} has {len(recipe.stages) or 'no'} stages, and a chain "
            "needs two. Leave it out."
        )

    files: dict[Path, str] = {}
    jobs = (PlannedJob(run_dir),)
    elements: list[PlannedJob] = []
    if how.elements:
        for index, element in enumerate(_elements(job, how.elements, run_dir)):
            _check(element, world, f"--array element {index}: ")
            files[launch / f"recipe-{index}.yaml"] = dump_yaml(element, only_given=True)
            elements.append(PlannedJob(run_dir / str(index), " ".join(how.elements[index])))
    else:
        check_for_ranks(recipe, world)
        files[launch / "recipe.yaml"] = dump_yaml(recipe, only_given=True)
    if how.chain:
        jobs = tuple(_chain(recipe, run_dir, files))

    train_words: list[str] = []
    if job.resume != "auto":
        train_words += ["--resume", job.resume]
    if job.gpus is not None:
        train_words += ["--gpus", job.gpus]
    parts = ScriptParts(
        settings,
        recipe.run.name,
        run_dir,
        working_dir,
        tuple(train_words),
        num_elements=len(elements) or None,
        at_once=how.at_once,
    )
    files[launch / SCRIPT] = write_script(parts)
    return SubmitPlan(run_dir, launch / SCRIPT, files, jobs, tuple(elements), how.after)


def _settings(job: Job, settings: SlurmConfig) -> SlurmConfig:
    """The settings with what the job itself says on top."""
    changes: dict[str, object] = {"setup": (*settings.setup, *job.setup)}
    if job.num_nodes != 1:
        changes["nodes"] = job.num_nodes
    if job.ranks_per_node is not None:
        changes["nproc"] = job.ranks_per_node
    return settings.model_copy(update=changes)


def _check(recipe: Recipe, world: int, prefix: str) -> None:
    """`check_for_ranks` with a prefix in front of what it refuses."""
    try:
        check_for_ranks(recipe, world)
    except ConfigError as problem:
        raise ConfigError(f"{prefix}{problem}") from None


def _elements(job: Job, elements: Sequence[Sequence[str]], run_dir: Path) -> list[Recipe]:
    """The recipe of each element of an array."""
    if len(elements) > MAX_ELEMENTS:
        raise ConfigError(
            f"--array has {len(elements)} elements; SLURM takes {MAX_ELEMENTS} by default. "
            "Split it."
        )
    recipes: list[Recipe] = []
    for index, overrides in enumerate(elements):
        for override in overrides:
            if override.startswith(("run.name=", "run.dir=")):
                raise ConfigError(
                    f"--array element {index} has {override}; each element has its own run folder, "
                    f"{run_dir}/{index}. Leave it out."
                )
        # In quotes: a name of digits alone would be read as a number.
        folder = [f"run.dir={run_dir}", f'run.name="{index}"']
        try:
            recipes.append(load(Recipe, job.recipe, [*job.overrides, *overrides, *folder]))
        except ConfigError as problem:
            raise ConfigError(f"--array element {index}: {problem}") from None
    return recipes


def _chain(recipe: Recipe, run_dir: Path, files: dict[Path, str]) -> list[PlannedJob]:
    """A job for each stage: it trains the recipe's stages up to its own, of which the earlier ones
    are done.
    """
    jobs: list[PlannedJob] = []
    # One run folder for all: stages that are done there are skipped.
    for number, stage in enumerate(recipe.stages, 1):
        path = run_dir / FOLDER / f"recipe-stage-{number}.yaml"
        shortened = recipe.model_copy(update={"stages": recipe.stages[:number]})
        files[path] = dump_yaml(shortened, only_given=True)
        jobs.append(PlannedJob(run_dir, stage.name, (str(path),)))
    return jobs


def read_elements(texts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The override sets of `--array`: each a text of key=value words, or a file with one set per
    line.
    """
    lines: list[str] = []
    for text in texts:
        # The name of a file may have an equals sign, too.
        path = Path(text)
        if "=" not in text or path.is_file():
            try:
                with open(path, encoding="utf-8", opener=regular_only) as file:
                    lines += file.read().splitlines()
            except (OSError, ValueError) as problem:
                raise ConfigError(
                    f"--array is {text[:200]!r}; neither key=value words nor a readable file: "
                    f"{problem}."
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
        wrong = next((word for word in words if "=" not in word), None)
        if wrong:
            raise ConfigError(
                f"--array has {wrong[:200]!r}; each word must be key=value, e.g. "
                '"optim.lr=3e-4 seed=1".'
            )
        # Empty lines and comments of a file give no words.
        if words:
            sets.append(words)
    if texts and not sets:
        raise ConfigError(
            '--array has no override sets. Give each as "key=value key=value", or a file with one '
            "per line."
        )
    return tuple(sets)

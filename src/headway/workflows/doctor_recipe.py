"""`headway doctor recipe`: a recipe comes in; whether training would accept it, whether it fits,
and what in it makes no sense goes out.

Everything `headway train` refuses is found here too, without a run folder: files, shapes, layout,
data, targets. Then come settings that are legal and yet a mistake: a warm-up longer than the run, a
validation that never runs, a checkpoint that is never written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from headway.data.config import ResolvedBatch
from headway.data.open import OpenData
from headway.data.target_check import check_targets
from headway.diagnose.check import Check
from headway.errors import HeadwayError
from headway.model.layout import param_specs
from headway.parallel.collectives import RankGroup, RankGroups
from headway.plan.hardware import GpuModel
from headway.plan.memory import amount, estimate
from headway.plan.result import make_plan
from headway.plan.search import nearest_fitting
from headway.plan.table import summary_row
from headway.runtime.device import choose_compute
from headway.runtime.progress import quantity
from headway.train import dry_run
from headway.train.batches import count_steps, make_loader
from headway.train.config import Recipe
from headway.train.memory import describe_job, memory_limit
from headway.train.planning import PlanTarget, plan_job
from headway.train.resolve import Resolved
from headway.workflows.doctor_data import open_resolved, resolve_all

MANY_EPOCHS = 20
"""More passes over the data than this get a warning."""
LARGE_PARAMETERS = 100_000_000
"""From this size on, a model trained from scratch has the usual rates of a large one."""
SHORT_STEPS = 100
"""A run of so few steps needs no checkpoint before its end."""
RATES = {
    # what trains: (lowest, highest) usual peak rate of AdamW
    "adapter": (2e-5, 2e-3),
    "fine-tuning": (1e-7, 2e-4),
    "large model": (1e-6, 2e-3),
    "small model": (1e-6, 2e-2),
}
SCALES = {"lion": 0.2, "muon": 10.0, "schedule_free": 3.0, "adafactor": 10.0}
"""Peak rates of other optimizers, relative to AdamW's."""


@dataclass(frozen=True)
class RecipeTarget:
    """Where the recipe is to run; None: this machine."""

    gpu: GpuModel | None = None
    world: int | None = None


@dataclass(frozen=True)
class RecipeTrial:
    """A resolved recipe with its opened data and the numbers of its run."""

    resolved: Resolved
    data: OpenData
    batch: ResolvedBatch
    steps: int
    rows_per_epoch: int | None
    """None for generated data, which has no end."""

    @property
    def recipe(self) -> Recipe:
        """The recipe with what it names filled in."""
        return self.resolved.recipe


def check_recipe(recipe: Recipe, target: RecipeTarget = RecipeTarget()) -> list[Check]:
    """Every check of a recipe. What training refuses is a check that failed; nothing later is tried
    then.
    """
    try:
        all_resolved = resolve_all(recipe)
    except HeadwayError as error:
        return [
            Check(
                "recipe",
                "fail",
                str(error),
                "Correct this setting; it is the first one that training refuses.",
            )
        ]
    checks = [Check("recipe", "ok", "every setting is known, and the files it names were found")]
    for stage, resolved in all_resolved:
        for check in _check_resolved(resolved, target):
            # Names of checks repeat from stage to stage.
            if stage is not None:
                check = check.on(stage)
            checks.append(check)
    return checks


def _check_resolved(resolved: Resolved, target: RecipeTarget) -> Iterator[Check]:
    """The checks of one stage, or of a recipe without stages."""
    recipe = resolved.recipe
    end_ids = frozenset[int]()
    if resolved.weights:
        end_ids = resolved.weights.end_ids
    try:
        data = open_resolved(resolved)
        targets = check_targets(data, resolved.tokenizer, end_ids)
        detail = "; ".join(targets.lines)
        if not detail:
            detail = f"{len(data.train)} sources, {len(data.valid)} validation sets"
        yield Check("data", "ok", detail)
        trial = _trial(resolved, data, target.world or 1)
    except HeadwayError as error:
        yield Check(
            "data",
            "fail",
            str(error),
            "Correct the data; `headway doctor data` shows it as training reads it.",
        )
        return

    # Most of what follows is compared with the number of steps, which depends on the data.
    yield from memory_checks(resolved, target)
    yield from length_checks(trial)
    yield from rate_checks(trial)
    yield from validation_checks(trial)
    yield from saving_checks(trial)
    if recipe.log.every > trial.steps:
        detail = f"log.every is {recipe.log.every} and the run has {trial.steps} steps"
        yield Check(
            "log",
            "warn",
            f"{detail}: only the first and the last step are shown",
            "Lower log.every.",
        )


def _trial(resolved: Resolved, data: OpenData, world: int) -> RecipeTrial:
    """The numbers of a run on `world` ranks, or on the fewest that the layout needs."""
    recipe = resolved.recipe
    fewest = recipe.parallel.ranks_per_row * recipe.parallel.expert
    mesh = recipe.parallel.mesh(0, max(world, fewest))
    batch = recipe.batch.resolve(recipe.data.seq_len, mesh.data)

    # No other rank runs. A loader of rank 0 counts steps and rows without them.
    ranks = RankGroups(data=RankGroup(0, mesh.data))
    with make_loader(recipe, data, batch, None, ranks) as loader:
        rows = None
        if recipe.data.train is not None:
            rows = loader.rows_per_epoch()
        return RecipeTrial(resolved, data, batch, count_steps(recipe, loader, batch), rows)


def memory_checks(resolved: Resolved, target: RecipeTarget) -> Iterator[Check]:
    """Whether a step fits: on the given GPU as `headway plan` says, else on this machine."""
    try:
        if target.gpu is not None:
            yield _memory_on(target.gpu, resolved.recipe, target.world)
        else:
            yield _memory_here(resolved)
    except HeadwayError as error:
        yield Check(
            "memory",
            "fail",
            str(error),
            "Correct the layout; `headway plan --search` lists those that fit.",
        )


def _memory_on(gpu: GpuModel, recipe: Recipe, world: int | None) -> Check:
    """Whether a step fits on this many GPUs of a model."""
    job = plan_job(recipe, PlanTarget(gpu, world))
    plan = make_plan(job)
    needed = max(memory.total for memory in plan.by_rank)
    detail = (
        f"{amount(needed)} of {amount(job.usable_bytes)} on {job.layout.world} x {job.gpu.name}"
    )
    if plan.fits:
        return Check("memory", "ok", detail)

    alternatives: list[str] = []
    for candidate in nearest_fitting(job)[:2]:
        # The first two cells of a row: the layout, and rows x microbatches.
        alternatives.append(", ".join(str(cell) for cell in summary_row(candidate)[:2]))
    remedy = "Use more GPUs, shorter rows or a smaller model."
    if alternatives:
        remedy = f"These fit: {'; '.join(alternatives)} (headway plan shows more)."
    return Check("memory", "fail", f"it does not fit: {detail}", remedy)


def _memory_here(resolved: Resolved) -> Check:
    """Whether a step fits on this machine. If not, it is a warning: the run may be for another."""
    recipe = resolved.recipe
    compute = choose_compute(recipe.device, recipe.precision)
    batch = recipe.batch.resolve(recipe.data.seq_len, 1)
    needed = estimate(describe_job(recipe, resolved.model, compute, batch, 1)).total
    limit = memory_limit(recipe, compute.device)
    detail = f"a step needs about {amount(needed)} on {compute.name}"
    if limit is None:
        return Check("memory", "ok", detail)

    detail += f", which has {amount(limit)}"
    if needed <= limit:
        return Check("memory", "ok", detail)
    return Check(
        "memory",
        "warn",
        f"{detail}: it does not fit here",
        "Give --gpu and --world of the machine it will run on.",
    )


def length_checks(trial: RecipeTrial) -> Iterator[Check]:
    """Steps, epochs and the batch against the amount of data."""
    recipe = trial.recipe
    rows = trial.rows_per_epoch
    batch = trial.batch
    length = f"{trial.steps:,} steps of {batch.rows} rows ({quantity(batch.tokens)} tokens)"
    if rows is None:
        yield Check("length", "ok", f"{length} of generated data")
        return

    epochs = trial.steps * batch.rows / max(1, rows)
    detail = f"{length}, about {epochs:.2g} passes over {rows:,} rows"
    if batch.rows > rows:
        yield Check(
            "length",
            "warn",
            f"{detail}: a batch is larger than all data",
            "Lower batch.rows or batch.tokens.",
        )
    elif epochs > MANY_EPOCHS:
        yield Check(
            "length",
            "warn",
            f"{detail}: the model will learn the data by heart",
            "Train for fewer steps, or on more data.",
        )
    else:
        yield Check("length", "ok", detail)

    # A skipped batch is no step, so a run reads as many batches more as it skips.
    num_skipped = sum(last - first + 1 for first, last in recipe.data.skipped)
    latest = max((first for first, _ in recipe.data.skipped), default=0)
    if latest >= trial.steps + num_skipped:
        yield Check(
            "skip_batches",
            "warn",
            f"data.skip_batches names batch {latest}, after the end of the run",
            "Correct the numbers.",
        )


def rate_checks(trial: RecipeTrial) -> Iterator[Check]:
    """The peak learning rate against what is usual, and the warm-up against the run's length."""
    recipe = trial.recipe
    schedule = recipe.optim.schedule
    rate = recipe.optim.lr
    size = sum(prod(spec.shape) for spec in param_specs(trial.resolved.model))
    task_rates = recipe.objective.usual_rates

    # An adapter comes first: whatever the task, its few new parameters take higher rates.
    if recipe.adapter is not None:
        kind = "adapter"
    elif task_rates is not None:
        kind = task_rates.name
    elif recipe.init.source is not None:
        kind = "fine-tuning"
    elif size >= LARGE_PARAMETERS:
        kind = "large model"
    else:
        kind = "small model"
    bounds = RATES.get(kind)
    if bounds is None:
        assert task_rates is not None
        bounds = (task_rates.low, task_rates.high)
    low, high = (bound * SCALES.get(recipe.optim.kind, 1.0) for bound in bounds)

    detail = f"peak {rate:g} with {recipe.optim.kind} ({kind}); usual are {low:g} to {high:g}"
    if rate == 0:
        yield Check("learning rate", "fail", "optim.lr is 0: nothing is learned", "Set optim.lr.")
    elif not low <= rate <= high:
        direction = "Lower" if rate > high else "Raise"
        yield Check("learning rate", "warn", detail, f"{direction} optim.lr, unless you tried it.")
    else:
        yield Check("learning rate", "ok", detail)

    warmup = schedule.zero_steps + schedule.warmup_steps(trial.steps)
    if warmup >= trial.steps:
        # A rate that only rises, or is constant, is highest at one of the two ends.
        peak = max(schedule.factor(step, trial.steps) for step in (0, trial.steps - 1)) * rate
        detail = (
            f"takes {warmup} steps and the run has {trial.steps}: the rate only reaches {peak:.2g}"
        )
        yield Check(
            "warm-up",
            "warn",
            detail,
            "Shorten optim.schedule.warmup (a fraction such as 0.05 follows the run's length).",
        )
    else:
        yield Check("warm-up", "ok", f"{warmup} of {trial.steps} steps")


def validation_checks(trial: RecipeTrial) -> Iterator[Check]:
    """Whether and how often the run is validated."""
    recipe = trial.recipe
    if not trial.data.valid:
        if recipe.data.train is not None:
            remedy = "Set data.valid: 0.01 (a share of the documents) or validation sets."
            yield Check(
                "validation",
                "warn",
                "data.valid is not set, so nothing shows whether the model overfits",
                remedy,
            )
        return
    # A run with validation data is validated at its end in any case.
    every = recipe.eval.every
    if every is None or every >= trial.steps:
        setting = "null" if every is None else every
        detail = (
            f"runs only once, at the end: eval.every is {setting} and the run has {trial.steps} "
            "steps"
        )
        yield Check("validation", "warn", detail, "Lower eval.every.")
        if recipe.eval.stop is not None:
            yield Check(
                "early stopping",
                "fail",
                "eval.stop needs several validations and there is one",
                "Lower eval.every.",
            )
        return

    count = trial.steps // every
    yield Check("validation", "ok", f"{count} times, every {every} steps")
    stop = recipe.eval.stop
    if stop is not None and count <= stop.patience:
        detail = (
            f"eval.stop.patience is {stop.patience} and there are {count} validations: it can "
            "never stop the run"
        )
        yield Check("early stopping", "warn", detail, "Lower eval.stop.patience or eval.every.")


def saving_checks(trial: RecipeTrial) -> Iterator[Check]:
    """Whether a crash would lose the run."""
    config = trial.recipe.checkpoint
    steps = trial.steps
    intervals = [
        every
        for every in (config.every, config.snapshot_every)
        if every is not None and every < steps
    ]
    if not intervals and not config.at_end:
        yield Check(
            "checkpoints",
            "fail",
            "no checkpoint is ever written: the run would leave nothing",
            "Set checkpoint.every or at_end.",
        )
    elif not intervals:
        detail = (
            f"are written only at the end (checkpoint.every is {config.every}, the run has {steps} "
            "steps); a crash loses everything"
        )
        if steps > SHORT_STEPS:
            yield Check("checkpoints", "warn", detail, "Lower checkpoint.every.")
        else:
            yield Check("checkpoints", "ok", detail)
    else:
        yield Check("checkpoints", "ok", f"every {min(intervals)} of {steps} steps")
    if config.on_best and not trial.data.valid:
        yield Check(
            "best checkpoint",
            "warn",
            "checkpoint.on_best is true and nothing is validated",
            "Set data.valid.",
        )


def check_step(recipe: Recipe) -> Check:
    """Build everything and train one step in memory, as a dry run does."""
    # Never resumed: a finished run in the folder would leave no step to train.
    try:
        outcome = dry_run(recipe, resume="never")
    except HeadwayError as error:
        return Check("one step", "fail", str(error), "Correct it; training would end here.")
    # With stages, a dry run reports each of them.
    first: dict[str, Any] = outcome.get("first_step") or outcome["stages"][0]["first_step"]
    return Check(
        "one step",
        "ok",
        f"loss {first['loss']:.4f} in {first['time']['step_seconds']:.2f} s; nothing was written",
    )

"""`headway doctor recipe`: a recipe comes in; whether training would accept it, whether it fits, and what in it makes no sense goes out.

Everything `headway train` refuses is found here too, without a run folder: files, shapes, layout, data, targets. Then come settings that
are legal and yet a mistake: a warm-up longer than the run, a validation that never runs, a checkpoint that is never written.
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
LARGE_PARAMETERS = 100_000_000
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

    @property
    def recipe(self) -> Recipe:
        """The recipe with what it names filled in."""
        return self.resolved.recipe


def check_recipe(recipe: Recipe, target: RecipeTarget = RecipeTarget()) -> list[Check]:
    """Every check of a recipe. What training refuses is a check that failed; nothing later is tried then."""
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
        found = list(_check_one(resolved, target))
        checks += [check if stage is None else check.on(stage) for check in found]
    return checks


def _check_one(resolved: Resolved, target: RecipeTarget) -> Iterator[Check]:
    recipe = resolved.recipe
    try:
        data = open_resolved(resolved)
        targets = check_targets(
            data, resolved.tokenizer, resolved.weights.end_ids if resolved.weights else frozenset()
        )
        yield Check(
            "data",
            "ok",
            "; ".join(targets.lines)
            or f"{len(data.train)} sources, {len(data.valid)} validation sets",
        )
        trial = _trial(resolved, data, target.world or 1)
    except HeadwayError as error:
        yield Check(
            "data",
            "fail",
            str(error),
            "Correct the data; `headway doctor data` shows it as training reads it.",
        )
        return
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
    recipe = resolved.recipe
    mesh = recipe.parallel.mesh(
        0, max(world, recipe.parallel.ranks_per_row * recipe.parallel.expert)
    )
    batch = recipe.batch.resolve(recipe.data.seq_len, mesh.data)
    ranks = RankGroups(
        data=RankGroup(0, mesh.data)
    )  # the first of ranks that do not run: a loader only counts by them
    with make_loader(recipe, data, batch, None, ranks) as loader:
        rows = None if recipe.data.train is None else loader.rows_per_epoch()
        return RecipeTrial(resolved, data, batch, count_steps(recipe, loader, batch), rows)


def memory_checks(resolved: Resolved, target: RecipeTarget) -> Iterator[Check]:
    """Whether a step fits: on the given GPU as `headway plan` says, else on this machine."""
    recipe = resolved.recipe
    try:
        if target.gpu is not None:
            job = plan_job(recipe, PlanTarget(target.gpu, target.world))
            made = make_plan(job)
            detail = f"{amount(max(one.total for one in made.by_rank))} of {amount(job.usable_bytes)} on {job.layout.world} x {job.gpu.name}"
            if made.fits:
                yield Check("memory", "ok", detail)
                return
            near = [
                ", ".join(str(cell) for cell in summary_row(one)[:2])
                for one in nearest_fitting(job)[:2]
            ]
            remedy = (
                f"These fit: {'; '.join(near)} (headway plan shows more)."
                if near
                else "Use more GPUs, shorter rows or a smaller model."
            )
            yield Check("memory", "fail", f"it does not fit: {detail}", remedy)
            return
        compute = choose_compute(recipe.device, recipe.precision)
        batch = recipe.batch.resolve(recipe.data.seq_len, 1)
        wanted, limit = (
            estimate(describe_job(recipe, resolved.model, compute, batch, 1)).total,
            memory_limit(recipe, compute.device),
        )
    except HeadwayError as error:
        yield Check(
            "memory",
            "fail",
            str(error),
            "Correct the layout; `headway plan --search` lists those that fit.",
        )
        return
    detail = f"a step needs about {amount(wanted)} on {compute.name}" + (
        "" if limit is None else f", which has {amount(limit)}"
    )
    if limit is not None and wanted > limit:
        yield Check(
            "memory",
            "warn",
            f"{detail}: it does not fit here",
            "Give --gpu and --world of the machine it will run on.",
        )
    else:
        yield Check("memory", "ok", detail)


def length_checks(trial: RecipeTrial) -> Iterator[Check]:
    """Steps, epochs and the batch against the amount of data."""
    recipe, rows, batch = trial.recipe, trial.rows_per_epoch, trial.batch
    read = f"{trial.steps:,} steps of {batch.rows} rows ({quantity(batch.tokens)} tokens)"
    if rows is None:
        yield Check("length", "ok", f"{read} of generated data")
        return
    epochs = trial.steps * batch.rows / max(1, rows)
    detail = f"{read}, about {epochs:.2g} passes over {rows:,} rows"
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
    last = max((first for first, _ in recipe.data.skipped), default=0)
    if last >= trial.steps + sum(last - first + 1 for first, last in recipe.data.skipped):
        yield Check(
            "skip_batches",
            "warn",
            f"data.skip_batches names batch {last}, after the end of the run",
            "Correct the numbers.",
        )


def rate_checks(trial: RecipeTrial) -> Iterator[Check]:
    """The peak learning rate against what is usual, and the schedule against the length of the run."""
    recipe = trial.recipe
    schedule, rate = recipe.optim.schedule, recipe.optim.lr
    size = sum(prod(spec.shape) for spec in param_specs(trial.resolved.model))
    of_task = recipe.objective.usual_rates
    if recipe.adapter is not None:
        kind = "adapter"
    elif of_task is not None:
        kind = of_task.name
    elif recipe.init.source is not None:
        kind = "fine-tuning"
    elif size >= LARGE_PARAMETERS:
        kind = "large model"
    else:
        kind = "small model"
    bounds = RATES.get(kind)
    if bounds is None:
        assert of_task is not None
        bounds = (of_task.low, of_task.high)
    low, high = (bound * SCALES.get(recipe.optim.kind, 1.0) for bound in bounds)
    detail = f"peak {rate:g} with {recipe.optim.kind} ({kind}); usual are {low:g} to {high:g}"
    if rate == 0:
        yield Check("learning rate", "fail", "optim.lr is 0: nothing is learned", "Set optim.lr.")
    elif not low <= rate <= high:
        yield Check(
            "learning rate",
            "warn",
            detail,
            f"{'Lower' if rate > high else 'Raise'} optim.lr, unless you tried it.",
        )
    else:
        yield Check("learning rate", "ok", detail)
    before = schedule.zero_steps + schedule.warmup_steps(trial.steps)
    if before >= trial.steps:
        peak = max(schedule.factor(step, trial.steps) for step in (0, trial.steps - 1)) * rate
        detail = (
            f"takes {before} steps and the run has {trial.steps}: the rate only reaches {peak:.2g}"
        )
        yield Check(
            "warm-up",
            "warn",
            detail,
            "Shorten optim.schedule.warmup (a fraction such as 0.05 follows the run's length).",
        )
    else:
        yield Check("warm-up", "ok", f"{before} of {trial.steps} steps")


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
    every = recipe.eval.every
    if every is None or every >= trial.steps:
        detail = f"runs only once, at the end: eval.every is {'null' if every is None else every} and the run has {trial.steps} steps"
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
        detail = f"eval.stop.patience is {stop.patience} and there are {count} validations: it can never stop the run"
        yield Check("early stopping", "warn", detail, "Lower eval.stop.patience or eval.every.")


def saving_checks(trial: RecipeTrial) -> Iterator[Check]:
    """Whether a crash would lose the run."""
    config, steps = trial.recipe.checkpoint, trial.steps
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
        detail = f"are written only at the end (checkpoint.every is {config.every}, the run has {steps} steps); a crash loses everything"
        yield Check(
            "checkpoints",
            "warn" if steps > 100 else "ok",
            detail,
            "Lower checkpoint.every." if steps > 100 else None,
        )
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
    try:
        outcome = dry_run(recipe, resume="never")
    except HeadwayError as error:
        return Check("one step", "fail", str(error), "Correct it; training would end here.")
    first: dict[str, Any] = outcome.get("first_step") or outcome["stages"][0]["first_step"]
    return Check(
        "one step",
        "ok",
        f"loss {first['loss']:.4f} in {first['time']['step_seconds']:.2f} s; nothing was written",
    )

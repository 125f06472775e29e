"""`headway plan`: a recipe, a number of ranks and a GPU come in, a `PlanJob` goes out. Reads what the recipe names, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.checkpoint.stored_model import find_model
from headway.errors import ConfigError, DataError
from headway.model.adapter.config import all_specs
from headway.model.config import ModelConfig
from headway.model.families.base import WRAPPED
from headway.model.layout import Specs
from headway.optim.adamw import Config as AdamWConfig
from headway.optim.groups import make_groups, trainable
from headway.parallel.config import ParallelConfig
from headway.parallel.layout_rules import LayoutCase, broken_rules
from headway.parallel.layouts import Layout
from headway.plan.hardware import GpuModel
from headway.plan.job import PlanJob
from headway.plan.memory import estimate
from headway.plan.rates import AttentionKernel, Software
from headway.plan.reference import ReferenceModel
from headway.train.config import Recipe
from headway.train.resolve import resolve
from headway.train.run_form import run_form

MAX_MICRO_ROWS = 4096
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class PlanTarget:
    """What a recipe is planned for."""

    gpu: GpuModel
    world: int | None = None
    """Number of ranks; None = the fewest that the recipe's axes need."""


def plan_job(recipe: Recipe, target: PlanTarget) -> PlanJob:
    """The recipe on this many ranks; a layout that breaks a rule is a ParallelError with the nearest one that works."""
    if not run_form(recipe.model).is_estimated:
        raise ConfigError(
            "model.aligner is given; plan knows language models only. `headway train RECIPE --dry-run` takes one step of it."
        )
    model = planned_model(recipe)
    layout = layout_of(recipe.parallel, target.world)
    parallel, seq_len = recipe.parallel, recipe.data.seq_len
    _check_rows(recipe, model)
    specs = all_specs(model, recipe.adapter)
    training = trainable(specs, recipe.freeze, recipe.train)
    job = PlanJob(
        model=model,
        seq_len=seq_len,
        rows=1,
        accumulate=1,
        layout=layout,
        gpu=target.gpu,
        precision="bf16" if recipe.precision == "auto" else recipe.precision,
        memory=recipe.memory,
        software=software_of(recipe, target.gpu),
        specs=specs,
        training=frozenset(training),
        state_dtype=recipe.optim.state_dtype if isinstance(recipe.optim, AdamWConfig) else "fp32",
        other_state_bytes=_state_bytes(recipe, specs, training),
        grad_bytes=4 if parallel.accumulate_dtype == "fp32" or recipe.precision == "fp32" else 2,
        bucket_bytes=parallel.bucket_bytes,
        pipeline_split=parallel.pipeline_split,
        allows=lambda other: obeys_rules(recipe, model, other),
        reshard=parallel.fsdp.reshard_after_forward,
        reference=reference_model(recipe, model),
    )
    job.check()
    parallel.check_rows(model, seq_len, recipe.objective, recipe.adapter)
    batch = recipe.batch.resolve(seq_len, layout.data)
    if recipe.batch.micro_rows == "auto":
        job = largest_microbatch(job, batch.micro_rows * batch.accumulate)
    else:
        job = replace(job, rows=batch.micro_rows, accumulate=batch.accumulate)
    return job


def reference_model(recipe: Recipe, model: ModelConfig) -> ReferenceModel | None:
    """The frozen second model that a recipe's objective keeps in memory; None where it has none, or where its numbers are stored."""
    wanted = recipe.objective.needs.frozen
    if wanted is None or wanted.cached:
        return None
    role = "teacher" if wanted.is_teacher else "reference"
    adapter = recipe.adapter
    if wanted.path is not None:
        adapter = None
        try:
            model = find_model(wanted.path, recipe.data.cache_dir).config
        except (ConfigError, DataError) as problem:
            raise ConfigError(f"{wanted.setting}: {problem}") from None
    specs = all_specs(model, adapter)
    kept = {name: spec for name, spec in specs.items() if "adapter" not in spec.groups}
    return ReferenceModel(role, model, kept)


def obeys_rules(recipe: Recipe, model: ModelConfig, layout: Layout) -> bool:
    """Whether `headway train` would take a layout for this recipe: its objective, adapter, dropout and masks too."""
    if (recipe.optim.NEEDS_MATRICES and layout.tensor > 1) or (
        recipe.optim.COUPLES_EXPERTS and layout.expert > 1
    ):
        return False
    changes = {
        axis: getattr(layout, axis)
        for axis in ("strategy", "tensor", "sequence", "pipeline", "schedule", "context", "expert")
    }
    virtual = layout.virtual_stages if layout.schedule == "interleaved" else None
    other = recipe.parallel.model_copy(
        update={**changes, "virtual_stages": virtual, "pipeline_split": ()}
    )
    return not any(
        broken_rules(
            LayoutCase(other, model, recipe.data.seq_len, recipe.objective, recipe.adapter)
        )
    )


def _state_bytes(recipe: Recipe, specs: Specs, training: set[str]) -> float | None:
    """Bytes of state per trained parameter, of an optimizer other than AdamW: its rules are torch code, which is imported here only."""
    if isinstance(recipe.optim, AdamWConfig):
        return None
    from headway.parallel.update_rules import state_bytes

    groups = make_groups(recipe.optim, specs, training, recipe.objective.rules)
    return state_bytes(recipe.optim, groups, {name: spec.shape for name, spec in specs.items()})


def planned_model(recipe: Recipe) -> ModelConfig:
    """The model's shape. Files are read only where the recipe alone does not say it: init.from, or the tokenizer's vocabulary."""
    if (
        recipe.init.source is None
        and recipe.model.vocab_size is not None
        and recipe.objective.needs.gates is None
    ):
        return recipe.model
    # the layout is checked here, by the rules of sizes: resolve would check it for training
    return resolve(recipe.model_copy(update={"parallel": ParallelConfig()})).model


def layout_of(parallel: ParallelConfig, world: int | None) -> Layout:
    """The layout a recipe asks for on this many ranks."""
    tensor, pipeline, shape = parallel.tensor, parallel.pipeline, parallel.pipeline_shape
    size = parallel.fsdp.size if parallel.strategy == "fsdp" else parallel.zero1.size
    ranks = world or tensor * pipeline * parallel.context * max(
        parallel.expert, 1 if size == "auto" else int(size)
    )
    return Layout(
        world=ranks,
        strategy=parallel.strategy,
        tensor=tensor,
        sequence=parallel.sequence,
        pipeline=pipeline,
        schedule=shape.schedule if pipeline > 1 else "1f1b",
        virtual_stages=shape.virtual_stages if pipeline > 1 else 1,
        context=parallel.context,
        expert=parallel.expert,
        shard=None if size == "auto" else int(size),
    )


def software_of(recipe: Recipe, gpu: GpuModel) -> Software:
    """How headway computes on this GPU under these settings."""
    kernels = recipe.kernels
    has_cudnn = gpu.generation in ("hopper", "blackwell") and kernels.attention != "varlen"
    attention: AttentionKernel = (
        "fa4" if kernels.attention == "fa4" else "cudnn" if has_cudnn else "fa2"
    )
    reduce = BYTES[recipe.parallel.reduce_dtype]
    compiles = kernels.compile in ("auto", True) and recipe.model.family != WRAPPED
    return Software(attention, "compiled" if compiles else "eager", reduce_bytes=reduce)


def largest_microbatch(job: PlanJob, rows: int) -> PlanJob:
    """batch.micro_rows=auto: the largest microbatch whose estimate fits on every rank; the smallest if none does."""
    found = replace(job, rows=1, accumulate=rows)
    for size in (n for n in range(1, min(rows, MAX_MICRO_ROWS) + 1) if rows % n == 0):
        other = replace(job, rows=size, accumulate=rows // size)
        if all(
            estimate(other.memory_job(rank)).total <= job.usable_bytes
            for rank in range(job.layout.pipeline)
        ):
            found = other
    return found


def _check_rows(recipe: Recipe, model: ModelConfig) -> None:
    """What rows need, whatever the layout."""
    if recipe.data.seq_len > model.max_seq_len:
        raise ConfigError(
            f"data.seq_len is {recipe.data.seq_len}; it must not exceed model.max_seq_len={model.max_seq_len}. Lower it."
        )

"""`headway plan`: a recipe, a number of ranks and a GPU come in, a `PlanJob` goes out.

Reads what the recipe names, imports no torch.
"""

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
from headway.plan.hardware import GIB, GpuModel
from headway.plan.job import PlanJob, ReferenceModel, SamplerCopy
from headway.plan.memory import estimate
from headway.plan.rates import AttentionKernel, Software
from headway.train.config import Recipe
from headway.train.resolve import resolve
from headway.train.run_form import run_form

MAX_MICRO_ROWS = 4096
"""Largest microbatch that batch.micro_rows=auto tries."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of one number."""


@dataclass(frozen=True)
class PlanTarget:
    """What a recipe is planned for."""

    gpu: GpuModel
    world: int | None = None
    """Number of ranks; None = the fewest that the recipe's axes need."""


def plan_job(recipe: Recipe, target: PlanTarget) -> PlanJob:
    """The recipe on this many ranks.

    A layout that breaks a rule is a ParallelError with the nearest one that works.
    """
    if not run_form(recipe.model).is_estimated:
        raise ConfigError(
            "model.aligner is given; plan knows language models only. "
            "`headway train RECIPE --dry-run` takes one step of it."
        )
    model = planned_model(recipe)
    layout = layout_of(recipe.parallel, target.world)
    parallel = recipe.parallel
    seq_len = recipe.data.seq_len
    _check_rows(recipe, model)

    specs = all_specs(model, recipe.adapter)
    training = trainable(specs, recipe.freeze, recipe.train)
    state_dtype = "fp32"
    if isinstance(recipe.optim, AdamWConfig):
        state_dtype = recipe.optim.state_dtype
    precision = recipe.precision
    if precision == "auto":
        precision = "bf16"
    grad_bytes = 2
    if parallel.accumulate_dtype == "fp32" or precision == "fp32":
        grad_bytes = 4
    # One row for now: the batch is resolved below, for a layout that is known to work.
    job = PlanJob(
        model=model,
        seq_len=seq_len,
        rows=1,
        accumulate=1,
        layout=layout,
        gpu=target.gpu,
        precision=precision,
        memory=recipe.memory,
        software=software_of(recipe, target.gpu),
        specs=specs,
        training=frozenset(training),
        state_dtype=state_dtype,
        other_state_bytes=_state_bytes(recipe, specs, training),
        grad_bytes=grad_bytes,
        bucket_bytes=parallel.bucket_bytes,
        pipeline_split=parallel.pipeline_split,
        allows=lambda other: obeys_rules(recipe, model, other),
        reshard=parallel.fsdp.reshard_after_forward,
        reference=reference_model(recipe, model),
        sampler=sampler_copy(recipe, model),
    )
    job.check()
    parallel.check_rows(model, seq_len, recipe.objective, recipe.adapter)

    batch = recipe.batch.resolve(seq_len, layout.data)
    if recipe.batch.micro_rows == "auto":
        return largest_microbatch(job, batch.micro_rows * batch.accumulate)
    return replace(job, rows=batch.micro_rows, accumulate=batch.accumulate)


def reference_model(recipe: Recipe, model: ModelConfig) -> ReferenceModel | None:
    """The frozen second model that a recipe's objective keeps in memory.

    None where it has none, or where its numbers are stored.
    """
    wanted = recipe.objective.needs.frozen
    if wanted is None or wanted.cached:
        return None
    if wanted.token_column is not None and wanted.path is None and recipe.adapter is not None:
        # The frozen base under the adapter, which is there anyway.
        return None
    # Without a path the reference is what the run starts from, quantised as its base is.
    adapter = recipe.adapter
    if wanted.path is not None:
        adapter = None
        try:
            model = find_model(wanted.path, recipe.data.cache_dir).config
        except (ConfigError, DataError) as problem:
            raise ConfigError(f"{wanted.setting}: {problem}") from None
    specs = all_specs(model, adapter)
    without_adapter = {name: spec for name, spec in specs.items() if "adapter" not in spec.groups}
    return ReferenceModel(wanted.role, model, without_adapter)


def sampler_copy(recipe: Recipe, model: ModelConfig) -> SamplerCopy | None:
    """What rollouts keep in memory as well; None where nothing is sampled."""
    if not recipe.objective.needs.rollouts:
        return None
    rollout = recipe.rollout
    cache_bytes = None
    if rollout.cache_gib is not None:
        cache_bytes = int(rollout.cache_gib * GIB)
    # A rank never samples more answers at the same time than its share of a rollout has.
    at_once = min(rollout.at_once, rollout.prompts * rollout.samples)
    # How long prompts are is known only when they are read; they count as long as answers.
    tokens = min(recipe.data.seq_len, model.max_seq_len, 2 * rollout.max_new_tokens)
    return SamplerCopy(model, at_once, tokens, cache_bytes)


def obeys_rules(recipe: Recipe, model: ModelConfig, layout: Layout) -> bool:
    """Whether `headway train` would take a layout for this recipe.

    Its objective, adapter, dropout and masks have rules, too.
    """
    if recipe.optim.NEEDS_MATRICES and layout.tensor > 1:
        return False
    if recipe.optim.COUPLES_EXPERTS and layout.expert > 1:
        return False
    changes = {
        axis: getattr(layout, axis)
        for axis in ("strategy", "tensor", "sequence", "pipeline", "schedule", "context", "expert")
    }
    virtual = layout.virtual_stages if layout.schedule == "interleaved" else None
    changed = recipe.parallel.model_copy(
        update={**changes, "virtual_stages": virtual, "pipeline_split": ()}
    )
    return not any(
        broken_rules(
            LayoutCase(changed, model, recipe.data.seq_len, recipe.objective, recipe.adapter)
        )
    )


def _state_bytes(recipe: Recipe, specs: Specs, training: set[str]) -> float | None:
    """Bytes of state per trained parameter, of an optimizer other than AdamW.

    Its rules are torch code, which is imported here only.
    """
    if isinstance(recipe.optim, AdamWConfig):
        return None
    from headway.parallel.update_rules import state_bytes

    groups = make_groups(recipe.optim, specs, training, recipe.objective.rules)
    return state_bytes(recipe.optim, groups, {name: spec.shape for name, spec in specs.items()})


def planned_model(recipe: Recipe) -> ModelConfig:
    """The model's shape.

    Files are read only where the recipe alone does not say it: init.from, or the tokenizer's
    vocabulary.
    """
    if (
        recipe.init.source is None
        and recipe.model.vocab_size is not None
        and recipe.objective.needs.gates is None
    ):
        return recipe.model
    # `plan_job` checks the layout by the sizes of the model; `resolve` would refuse it without the
    # nearest one that works.
    return resolve(recipe.model_copy(update={"parallel": ParallelConfig()})).model


def layout_of(parallel: ParallelConfig, world: int | None) -> Layout:
    """The layout a recipe asks for on this many ranks."""
    tensor = parallel.tensor
    pipeline = parallel.pipeline
    shard_size = parallel.zero1.size
    if parallel.strategy == "fsdp":
        shard_size = parallel.fsdp.size
    shard = None
    if shard_size != "auto":
        shard = int(shard_size)

    if not world:
        # Shards and experts divide the same data ranks, so the larger of the two decides.
        data_ranks = max(parallel.expert, shard or 1)
        world = tensor * pipeline * parallel.context * data_ranks

    # Without a pipeline its schedule has no effect.
    schedule = "1f1b"
    virtual_stages = 1
    if pipeline > 1:
        schedule = parallel.pipeline_shape.schedule
        virtual_stages = parallel.pipeline_shape.virtual_stages
    return Layout(
        world=world,
        strategy=parallel.strategy,
        tensor=tensor,
        sequence=parallel.sequence,
        pipeline=pipeline,
        schedule=schedule,
        virtual_stages=virtual_stages,
        context=parallel.context,
        expert=parallel.expert,
        shard=shard,
    )


def software_of(recipe: Recipe, gpu: GpuModel) -> Software:
    """How headway computes on this GPU under these settings."""
    kernels = recipe.kernels
    attention: AttentionKernel = "fa2"
    if kernels.attention == "fa4":
        attention = "fa4"
    elif gpu.generation in ("hopper", "blackwell") and kernels.attention != "varlen":
        attention = "cudnn"

    # A class of transformers runs uncompiled.
    compiles = kernels.compile in ("auto", True) and recipe.model.family != WRAPPED
    return Software(
        attention,
        "compiled" if compiles else "eager",
        reduce_bytes=BYTES[recipe.parallel.reduce_dtype],
    )


def largest_microbatch(job: PlanJob, rows: int) -> PlanJob:
    """batch.micro_rows=auto: the largest microbatch whose estimate fits on every rank.

    The smallest if none does.
    """
    largest = replace(job, rows=1, accumulate=rows)
    for size in range(1, min(rows, MAX_MICRO_ROWS) + 1):
        if rows % size:
            continue
        larger = replace(job, rows=size, accumulate=rows // size)
        needed = [estimate(larger.memory_job(stage)).total for stage in range(job.layout.pipeline)]
        if max(needed) <= job.usable_bytes:
            largest = larger
    return largest


def _check_rows(recipe: Recipe, model: ModelConfig) -> None:
    """What rows need, whatever the layout."""
    if recipe.data.seq_len > model.max_seq_len:
        raise ConfigError(
            f"data.seq_len is {recipe.data.seq_len}; "
            f"it must not exceed model.max_seq_len={model.max_seq_len}. Lower it."
        )

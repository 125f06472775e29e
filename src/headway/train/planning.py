"""`headway plan`: a recipe, a number of ranks and a GPU come in, a `PlanJob` goes out.

Reads what the recipe names, imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

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
from headway.plan.job import PlanJob, PromptLengths, ReferenceModel, RolloutShape, SamplerCopy
from headway.plan.memory import estimate
from headway.plan.rates import AttentionKernel, Software
from headway.train.config import Recipe
from headway.train.resolve import Resolved, resolve
from headway.train.run_form import run_form

if TYPE_CHECKING:
    from headway.data.mixture import MixtureSource
    from headway.data.open import OpenData
    from headway.tokenizer.load import Tokenizer

MAX_MICRO_ROWS = 4096
"""Largest microbatch that batch.micro_rows=auto tries."""
READ_PROMPTS = 1000
"""Prompts of each source that are read for their lengths, from its beginning."""
ASSUMED_PROMPT_TOKENS = 256
"""Mean length of prompts that cannot be read, where rows have room for it."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of one number."""


@dataclass(frozen=True)
class PlanTarget:
    """What a recipe is planned for."""

    gpu: GpuModel
    world: int | None = None
    """Number of ranks; None = the fewest that the recipe's axes need."""
    prompt_tokens: int | None = None
    """Length of prompts that are answered; None = as they are read, or assumed."""
    answer_tokens: int | None = None
    """Expected mean length of answers; None = rollout.max_new_tokens."""


def plan_job(recipe: Recipe, target: PlanTarget) -> PlanJob:
    """The recipe on this many ranks.

    A layout that breaks a rule is a ParallelError with the nearest one that works.
    """
    if not run_form(recipe.model).is_estimated:
        raise ConfigError(
            "model.aligner is given; plan knows language models only. "
            "`headway train RECIPE --dry-run` takes one step of it."
        )
    if recipe.objective.needs.rollouts:
        from headway.train.rollout_check import check_rollouts

        check_rollouts(recipe)
    resolved = None
    if _needs_files(recipe):
        resolved = _resolved(recipe)
    model = recipe.model if resolved is None else resolved.model
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
    )
    job.check()
    parallel.check_rows(model, seq_len, recipe.objective, recipe.adapter)

    batch = recipe.batch.resolve(seq_len, layout.data)
    if recipe.objective.needs.rollouts:
        lengths = _planned_lengths(recipe, model, target, resolved)
        rollout = rollout_shape(recipe, lengths, _expected_answer(recipe, target))
        return replace(
            job,
            rows=batch.micro_rows,
            accumulate=rollout.microbatches(seq_len, batch.micro_rows, layout.data),
            sampler=sampler_copy(recipe, model, lengths),
            rollout=rollout,
        )
    for option, tokens in (
        ("--prompt-tokens", target.prompt_tokens),
        ("--answer-tokens", target.answer_tokens),
    ):
        if tokens is not None:
            raise ConfigError(
                f"{option} is {tokens}, but objective {recipe.objective.kind} samples no answers. "
                "Leave it out."
            )
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
    # Where tokens are scored, the reference of an adapter is the frozen base, which is there anyway.
    is_base = wanted.token_column is not None and wanted.path is None and adapter is not None
    return ReferenceModel(wanted.role, model, without_adapter, is_base)


def sampler_copy(recipe: Recipe, model: ModelConfig, lengths: PromptLengths) -> SamplerCopy | None:
    """What rollouts keep in memory as well; None where nothing is sampled."""
    if not recipe.objective.needs.rollouts:
        return None
    rollout = recipe.rollout
    cache_bytes = None
    if rollout.cache_gib is not None:
        cache_bytes = int(rollout.cache_gib * GIB)
    # The engine has slots for at_once answers, also where a rank's share of a rollout is smaller:
    # held-out prompts are answered with the same slots.
    return SamplerCopy(
        model,
        at_once=rollout.at_once,
        tokens=min(model.max_seq_len, lengths.longest + rollout.max_new_tokens),
        cache_bytes_given=cache_bytes,
        keeps_routes=rollout.routes == "replay" and model.family != WRAPPED,
    )


def rollout_shape(
    recipe: Recipe, lengths: PromptLengths, answer_tokens: float | None = None
) -> RolloutShape:
    """How many answers the updates of a recipe train on.

    `answer_tokens`: their expected mean length; None: as long as they may be.
    """
    rollout = recipe.rollout
    # A divergence in the reward is scored once, when the answers were sampled.
    in_reward = recipe.objective.reward_divergence > 0
    return RolloutShape(
        prompts=rollout.prompts,
        samples=rollout.samples,
        max_new_tokens=rollout.max_new_tokens,
        prompt=lengths,
        answer_tokens=answer_tokens or float(rollout.max_new_tokens),
        documents_per_row=recipe.data.documents_per_row,
        updates=rollout.updates,
        passes=rollout.passes,
        ahead=rollout.ahead > 0,
        refill=rollout.refill,
        scores_first=rollout.num_updates > 1 or in_reward,
        reference_once=in_reward,
    )


def assumed_lengths(recipe: Recipe, model: ModelConfig) -> PromptLengths:
    """The lengths of prompts that were not read: the longest is what rows leave beside an answer,
    the mean is ASSUMED_PROMPT_TOKENS or that."""
    room = min(recipe.data.seq_len, model.max_seq_len) - recipe.rollout.max_new_tokens
    room = max(1, room)
    return PromptLengths(float(min(ASSUMED_PROMPT_TOKENS, room)), room)


def read_lengths(recipe: Recipe, tokenizer: Tokenizer | None) -> PromptLengths | None:
    """The lengths of the first prompts of each source, by the chat template.

    None where they cannot be read: no tokenizer, or no such files yet. Nothing is downloaded.
    """
    sources = recipe.data.train or ()
    are_files = all(Path(source.path).exists() for source in sources)
    if tokenizer is None or not sources or not are_files:
        return None
    from headway.rollout.prompts import read_prompts

    longest = recipe.data.seq_len - recipe.rollout.max_new_tokens
    lengths: list[int] = []
    for source in sources:
        limit = READ_PROMPTS
        if source.limit is not None:
            limit = min(limit, source.limit)
        beginning = source.model_copy(update={"limit": limit})
        prompts = read_prompts(beginning, recipe.data.cache_dir, tokenizer, longest=longest).prompts
        lengths += [len(prompt.ids) for prompt in prompts]
    return PromptLengths(sum(lengths) / len(lengths), max(lengths), len(lengths))


def lengths_of(data: OpenData) -> PromptLengths:
    """The lengths of the prompts that a run has opened: the mean of those that it trains on, the
    longest of all."""
    from headway.rollout.prompts import PromptSource

    def lengths(mixture: Sequence[MixtureSource]) -> list[int]:
        sources = [member.selection.source for member in mixture]
        return [
            len(prompt.ids)
            for source in sources
            if isinstance(source, PromptSource)
            for prompt in source.prompts
        ]

    trained = lengths(data.train)
    longest = max(trained)
    for mixture in data.valid.values():
        longest = max(longest, *lengths(mixture))
    return PromptLengths(sum(trained) / len(trained), longest, len(trained))


def _planned_lengths(
    recipe: Recipe, model: ModelConfig, target: PlanTarget, resolved: Resolved | None
) -> PromptLengths:
    """The lengths of the prompts of a recipe: given, read or assumed."""
    tokens = target.prompt_tokens
    if tokens is not None:
        room = recipe.data.seq_len - recipe.rollout.max_new_tokens
        if tokens > room:
            raise ConfigError(
                f"--prompt-tokens is {tokens}; data.seq_len={recipe.data.seq_len} leaves {room} "
                f"beside an answer of rollout.max_new_tokens={recipe.rollout.max_new_tokens}. "
                "Give fewer, or raise data.seq_len."
            )
        return PromptLengths(float(tokens), tokens)

    lengths = None
    try:
        if resolved is None:
            resolved = _resolved(recipe)
        lengths = read_lengths(recipe, resolved.tokenizer)
    except (ConfigError, DataError):
        # A plan needs neither tokenizer nor data: what they would say is then assumed.
        pass
    return lengths or assumed_lengths(recipe, model)


def _expected_answer(recipe: Recipe, target: PlanTarget) -> float | None:
    """The mean length of answers that was given; None: none was."""
    tokens = target.answer_tokens
    if tokens is None:
        return None
    longest = recipe.rollout.max_new_tokens
    if tokens > longest:
        raise ConfigError(
            f"--answer-tokens is {tokens}; rollout.max_new_tokens is {longest}, and the mean is at "
            "most that. Give fewer."
        )
    return float(tokens)


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


def _needs_files(recipe: Recipe) -> bool:
    """Whether the recipe alone does not say the model's shape.

    Then init.from says it, or the tokenizer its vocabulary.
    """
    return not (
        recipe.init.source is None
        and recipe.model.vocab_size is not None
        and recipe.objective.needs.gates is None
    )


def _resolved(recipe: Recipe) -> Resolved:
    """The recipe with what it names."""
    # `plan_job` checks the layout by the sizes of the model; `resolve` would refuse it without the
    # nearest one that works.
    return resolve(recipe.model_copy(update={"parallel": ParallelConfig()}))


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

"""Which layouts work: sizes of all axes, a model's shape and the sequence length come in.

The broken rules, or the first of them with the nearest layout that works, go out.

    world         pipeline x data x context x tensor
    tensor        divides the query heads, key heads of linear attention and ffn_size; KV heads are divided, or each is on
                  tensor / kv_heads ranks
    expert        divides the data ranks and the experts of a layer; divides the shard group or is
                  a multiple of it
    pipeline      at most one stage per layer
    context       not with layers that have a state; divides seq_len; beyond the KV heads of a rank, ring exchange with two pieces of
                  a row per rank
    strategy      fsdp has no pipeline
    experts       a model with experts has neither pipeline nor context

`headway plan` judges layouts by these rules. A run is checked by layout_rules.py, which also knows
its task and adapter and takes `broken_tensor` from here. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import isqrt, log2

from headway.errors import ParallelError
from headway.model.config import ModelConfig
from headway.parallel.mesh import broken_expert_sizes, ring_ranks
from headway.parallel.pipeline_order import ScheduleName


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: the size of every axis."""

    world: int = 1
    strategy: str = "zero1"
    tensor: int = 1
    sequence: bool = True
    """Norms and residual stream are split over tensor ranks too."""
    pipeline: int = 1
    schedule: ScheduleName = "1f1b"
    virtual_stages: int = 1
    """Stages of one rank (interleaved)."""
    context: int = 1
    expert: int = 1
    """Data-parallel ranks among which experts are split."""
    shard: int | None = None
    """Ranks that share optimizer state (zero1) or everything (fsdp); None = all ranks with the same
    part of the model."""

    @property
    def reduce(self) -> int:
        """Ranks whose gradients are summed: data x context."""
        return self.world // (self.pipeline * self.tensor)

    @property
    def data(self) -> int:
        """Ranks that read different rows."""
        return self.reduce // self.context

    @property
    def shards(self) -> int:
        """Ranks of one shard group."""
        if self.shard is None:
            return self.reduce
        return self.shard

    @property
    def expert_shards(self) -> int:
        """Ranks of one shard group that have the same experts."""
        return max(1, self.shards // self.expert)

    @property
    def stages(self) -> int:
        """Pipeline stages of the whole model."""
        return self.pipeline * self.virtual_stages

    def settings(self) -> str:
        """The layout as overrides of a recipe."""
        parts = [f"parallel.strategy={self.strategy}"]
        if self.shard is not None and self.shard != self.reduce:
            parts.append(f"parallel.{self.strategy}.size={self.shard}")
        parts += [
            f"parallel.{axis}={getattr(self, axis)}"
            for axis in ("tensor", "pipeline", "context", "expert")
            if getattr(self, axis) > 1
        ]
        if self.pipeline > 1 and self.schedule != "1f1b":
            parts.append(f"parallel.schedule={self.schedule}")
        if self.virtual_stages > 1:
            parts.append(f"parallel.virtual_stages={self.virtual_stages}")
        if self.tensor > 1 and not self.sequence:
            parts.append("parallel.sequence=false")
        return " ".join(parts)


@dataclass(frozen=True)
class LayoutShape:
    """What a layout must fit."""

    model: ModelConfig
    seq_len: int


def broken_sizes(layout: Layout, case: LayoutShape) -> Iterator[str]:
    """Every rule that a layout breaks, as a sentence without its remedy."""
    yield from _sizes(layout)
    yield from broken_tensor(layout, case)
    yield from _experts(layout, case)
    yield from _pipeline(layout, case)
    yield from _context(layout, case)


def _sizes(layout: Layout) -> Iterator[str]:
    taken = layout.pipeline * layout.context * layout.tensor
    if layout.world % taken:
        yield (
            f"pipeline {layout.pipeline} x context {layout.context} x tensor {layout.tensor} = "
            f"{taken} ranks; this must divide the number of ranks, {layout.world}"
        )
    elif layout.shard is not None and layout.reduce % layout.shard:
        yield (
            f"parallel.{layout.strategy}.size is {layout.shard}; it must divide the "
            f"{layout.reduce} ranks of data x context"
        )


def broken_tensor(layout: Layout, case: LayoutShape) -> Iterator[str]:
    """Every rule that the size of the tensor axis breaks.

    A rank has whole heads, an equal part of the feed-forward, rows of the vocabulary, and with
    sequence an equal number of tokens.
    """
    size = layout.tensor
    model = case.model
    if size == 1:
        return
    beginning = f"parallel.tensor is {size}; it must divide"
    for name, value in (("num_heads", model.num_heads), *_widths(model)):
        if value % size:
            yield f"{beginning} model.{name}={value}"
    linear = model.linear_attention
    if linear is not None and linear.key_heads % size:
        yield f"{beginning} model.linear_attention.key_heads={linear.key_heads}"
    if model.short_convolution is not None and model.convolved % size:
        yield f"{beginning} model.short_convolution.channels={model.convolved}"
    space = model.state_space
    if space is not None and space.heads % size:
        yield f"{beginning} model.state_space.heads={space.heads}"
    if space is not None and space.groups > 1 and space.groups % size:
        yield f"{beginning} model.state_space.groups={space.groups}, unless there is one"
    if model.kv_heads % size and size % model.kv_heads:
        yield f"{beginning} model.num_kv_heads={model.kv_heads}, or be a multiple of it"
    if layout.sequence and (case.seq_len // layout.context) % size:
        per_rank = ""
        if layout.context != 1:
            per_rank = f" / context {layout.context}"
        yield (
            f"{beginning} data.seq_len={case.seq_len}{per_rank}, since parallel.sequence splits "
            "tokens (false does not)"
        )
    # A size that is not known yet (the tokenizer's) is not judged.
    if (model.vocab_size or size) < size:
        yield (
            f"parallel.tensor is {size}; every rank needs a row of "
            f"model.vocab_size={model.vocab_size}"
        )


def _widths(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """The inner widths of feed-forward layers and experts, by setting."""
    experts = model.experts
    layers = range(model.num_layers)
    # A model whose layers are all mixtures has no plain feed-forward.
    if not all(map(model.is_mixture, layers)) or experts is None:
        yield "ffn_size", model.ffn_size
    if experts is not None:
        yield "experts.ffn_size", model.expert_size
        yield "experts.shared_ffn_size", experts.shared_ffn_size


def _experts(layout: Layout, case: LayoutShape) -> Iterator[str]:
    experts = case.model.experts
    if layout.expert > 1:
        key = f"parallel.{layout.strategy}.size"
        yield from broken_expert_sizes(layout.expert, layout.data, layout.shards, key)
        if experts is None:
            yield f"parallel.expert is {layout.expert} and the model has no experts"
        elif experts.num % layout.expert:
            yield (
                f"parallel.expert is {layout.expert}; it must divide "
                f"model.experts.num={experts.num}"
            )
    if experts is not None:
        for axis, size in (("pipeline", layout.pipeline), ("context", layout.context)):
            if size > 1:
                yield (
                    f"parallel.{axis} is {size} and model.experts is given; mixtures of experts "
                    f"have no {axis} axis"
                )


def _pipeline(layout: Layout, case: LayoutShape) -> Iterator[str]:
    if layout.pipeline == 1:
        if layout.virtual_stages > 1:
            yield (
                f"parallel.virtual_stages is {layout.virtual_stages} and parallel.pipeline is 1, "
                "which has one stage"
            )
        return
    beginning = f"parallel.pipeline is {layout.pipeline}"
    if layout.strategy == "fsdp":
        yield (
            f"{beginning} and parallel.strategy is fsdp, which has no pipeline; pipelines use zero1"
        )
    if layout.virtual_stages > 1 and layout.schedule == "1f1b":
        yield (
            f"parallel.virtual_stages is {layout.virtual_stages} and parallel.schedule is 1f1b, "
            "which has one stage per rank"
        )
    if layout.stages > case.model.num_layers:
        yield (
            f"{beginning} with {layout.virtual_stages} stages each; every stage needs a layer, and "
            f"the model has {case.model.num_layers}"
        )


def _context(layout: Layout, case: LayoutShape) -> Iterator[str]:
    if layout.context == 1:
        return
    given = case.model.state_section
    if given is not None:
        yield (
            f"parallel.context is {layout.context} and model.{given[0]} is given; its state "
            "passes through a whole row, which has no context axis"
        )
    beginning = f"parallel.context is {layout.context}; it must divide"
    if case.seq_len % layout.context:
        yield f"{beginning} data.seq_len={case.seq_len}"
    elif ring_size(layout, case.model) > 1 and case.seq_len % (2 * layout.context):
        yield (
            f"{beginning} data.seq_len={case.seq_len} into two pieces per rank, since it exceeds "
            "the KV heads and exchanges in a ring"
        )


def ulysses_size(layout: Layout, model: ModelConfig) -> int:
    """Context ranks that exchange heads for tokens.

    As many as divide the KV heads of a tensor rank.
    """
    return layout.context // ring_size(layout, model)


def ring_size(layout: Layout, model: ModelConfig) -> int:
    """Context ranks that pass keys and values in a ring, beyond the KV heads."""
    return ring_ranks(layout.context, model.kv_heads, layout.tensor)


def nearest_layouts(layout: Layout, case: LayoutShape, count: int = 1) -> list[Layout]:
    """Layouts of the same world that break no rule, by how little their axes differ."""
    # Every layout of the world is tried: their number is small, and a user waits for one answer.
    divisors = divisors_of(layout.world)
    # Experts are not split over more ranks than was asked for.
    expert_sizes = [n for n in divisors if n == 1 or n <= layout.expert]

    def distance(other: Layout) -> float:
        # Doublings and halvings of axes; another strategy counts as one, lesser changes as half.
        axes = sum(
            abs(log2(getattr(other, axis) / getattr(layout, axis)))
            for axis in ("tensor", "pipeline", "context", "expert")
        )
        return (
            axes
            + (other.strategy != layout.strategy)
            + 0.5 * (other.shard != layout.shard)
            + 0.5 * (other.schedule != layout.schedule)
        )

    working: list[Layout] = []
    strategies = [layout.strategy, *({"zero1", "fsdp"} - {layout.strategy})]
    for tensor, pipeline, context, expert, strategy in product(
        divisors, divisors, divisors, expert_sizes, strategies
    ):
        if layout.world % (tensor * pipeline * context):
            continue
        sizes = replace(
            layout,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            strategy=strategy,
        )
        if layout.shard is not None and sizes.reduce % layout.shard:
            sizes = replace(sizes, shard=None)

        # Without a pipeline there is one stage, so only the plain layout remains. Several stages
        # per rank may be too many for the layers; then one per rank, with 1f1b, may still work.
        plain = replace(sizes, virtual_stages=1, schedule="1f1b")
        candidates = [plain]
        if pipeline > 1 and layout.virtual_stages > 1:
            candidates = [sizes, plain]
        elif pipeline > 1:
            candidates = [sizes]
        working += [other for other in candidates if not any(broken_sizes(other, case))]
    return sorted(working, key=distance)[:count]


def divisors_of(number: int) -> list[int]:
    """All divisors of a number, in order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def check_sizes(layout: Layout, case: LayoutShape) -> None:
    """Refuse a layout that breaks a rule, with the nearest one that works, in one line."""
    broken = next(broken_sizes(layout, case), None)
    if broken is None:
        return
    near = nearest_layouts(layout, case)
    remedy = "Use another number of ranks."
    if near:
        remedy = f"The nearest layout that works on {layout.world} ranks: {near[0].settings()}."
    raise ParallelError(f"{broken}. {remedy}")

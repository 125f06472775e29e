"""Which layouts a run may have: a `LayoutCase` comes in, the broken rules go out, each with the nearest layout that works.

A rule refuses what would not equal one process. `headway train` raises the first broken rule before anything starts; `headway plan`
leaves out layouts that break one. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import ParallelError
from headway.parallel.layouts import Layout, LayoutShape, broken_tensor
from headway.parallel.mesh import ring_ranks

if TYPE_CHECKING:
    from headway.model.adapter.config import AdapterConfig
    from headway.model.config import ModelConfig
    from headway.parallel.config import ParallelConfig
    from headway.tasks.base import TaskConfig


@dataclass(frozen=True)
class LayoutCase:
    """What decides whether a layout works."""

    parallel: ParallelConfig
    model: ModelConfig
    seq_len: int
    objective: TaskConfig
    adapter: AdapterConfig | None = None


def check_layout(case: LayoutCase) -> None:
    """Raise the first rule that a layout breaks."""
    for broken in broken_rules(case):
        raise ParallelError(broken)


def broken_rules(case: LayoutCase) -> Iterator[str]:
    """Every rule that a layout breaks, as one line with the remedy."""
    for rule in RULES:
        yield from rule(case)


def nearest(degree: int, *must_divide: int) -> int:
    """The largest degree up to the given one that divides all of these numbers."""
    most = min(degree, *(number for number in must_divide if number), degree)
    return next(n for n in range(most, 0, -1) if all(number % n == 0 for number in must_divide))


def _pipeline(case: LayoutCase) -> Iterator[str]:
    parallel, layers = case.parallel, case.model.num_layers
    if parallel.virtual_stages is not None and parallel.schedule != "interleaved":
        yield (
            f"parallel.virtual_stages is {parallel.virtual_stages} and parallel.schedule is {parallel.schedule}, which has one stage per "
            "rank. Use schedule interleaved, or remove virtual_stages."
        )
    if parallel.pipeline == 1:
        return
    shape = parallel.pipeline_shape
    is_set = f"parallel.pipeline is {parallel.pipeline}"
    if parallel.strategy == "fsdp":
        yield f"{is_set} and parallel.strategy is fsdp, which shards every layer over all ranks. Use strategy zero1, or pipeline 1."
    if shape.stages > layers:
        each = f" with {shape.virtual_stages} stages each" if shape.virtual_stages > 1 else ""
        near = max(1, layers // shape.virtual_stages)
        yield f"{is_set}{each}; every stage needs a layer, and the model has {layers}. Use pipeline {near}."
    if case.objective.needs.frozen is not None:
        yield f"{is_set} and objective {case.objective.kind} needs a reference model, which has no stages. Use pipeline 1."
    split = parallel.pipeline_split
    if split and (len(split) != shape.stages or sum(split) != layers or min(split) < 1):
        yield (
            f"parallel.pipeline_split is {list(split)}; it must have {shape.stages} numbers, one per stage, at least 1 each, whose sum is "
            f"num_layers={layers}. Remove it for a split by cost."
        )


def _wrapped(case: LayoutCase) -> Iterator[str]:
    if case.model.hf_config is None:
        return
    for axis in ("tensor", "pipeline", "context"):
        if getattr(case.parallel, axis) > 1:
            yield (
                f"parallel.{axis} is {getattr(case.parallel, axis)} and model.family is transformers, whose layers headway cannot divide. "
                f"Use {axis} 1, and strategy zero1 or fsdp."
            )


def _experts(case: LayoutCase) -> Iterator[str]:
    experts, expert = case.model.experts, case.parallel.expert
    if experts is None:
        if expert > 1:
            yield f"parallel.expert is {expert} and the model has no experts (model.experts is null). Use expert 1."
        return
    if experts.num % expert:
        yield f"parallel.expert is {expert}; it must divide model.experts.num={experts.num}. Use {nearest(expert, experts.num)}."
    for axis, size in (("pipeline", case.parallel.pipeline), ("context", case.parallel.context)):
        if size > 1:
            yield f"parallel.{axis} is {size} and model.experts is given; mixtures of experts have no {axis} axis. Use {axis} 1."


def _tensor(case: LayoutCase) -> Iterator[str]:
    parallel = case.parallel
    shape = LayoutShape(case.model, case.seq_len)

    def broken(tensor: int) -> list[str]:
        layout = Layout(
            parallel.ranks_per_row,
            tensor=tensor,
            sequence=parallel.sequence,
            context=parallel.context,
        )
        return list(broken_tensor(layout, shape))

    for rule in broken(parallel.tensor):
        most = min(parallel.tensor, case.model.num_heads)  # it divides them
        fitting = next(n for n in range(most, 0, -1) if not broken(n))
        yield f"{rule}. Use {fitting}."


def _context(case: LayoutCase) -> Iterator[str]:
    context, model = case.parallel.context, case.model
    if context == 1:
        return
    is_set = f"parallel.context is {context}"
    ring = ring_ranks(context, model.kv_heads, case.parallel.tensor)
    if ring > 1:
        yield from _ring(case, is_set, ring)
    if case.seq_len % context:
        near = case.seq_len // context * context or context
        yield f"{is_set}; it must divide data.seq_len={case.seq_len}. Use seq_len {near}, for example."
    scaling = model.rope_scaling
    if (
        scaling is not None
        and scaling.kind == "longrope"
        and case.seq_len > scaling.original_max_seq_len
    ):
        yield (
            f"{is_set} and data.seq_len={case.seq_len} is above rope_scaling.original_max_seq_len={scaling.original_max_seq_len}: longrope "
            "depends on the length of whole documents, which a rank does not see. Use context 1."
        )
    if case.objective.needs.whole_rows:
        yield f"objective {case.objective.kind} needs whole rows: {is_set} and must be 1."
    for key, rate in (
        ("model.dropout", model.dropout),
        ("adapter.dropout", case.adapter.dropout if case.adapter else 0.0),
    ):
        if rate:
            yield f"{is_set} and {key} is {rate}, which would drop the same elements on all ranks of a row. Set the dropout to 0."


def _ring(case: LayoutCase, is_set: str, ring: int) -> Iterator[str]:
    """Context ranks beyond the KV heads pass keys around, which is exact for full causal attention only."""
    context, model = case.parallel.context, case.model
    whole = f"Use {context // ring}" + (
        f" or another divisor of {context // ring}." if context > 2 * ring else "."
    )
    beyond = f"{is_set}, which is beyond the {max(1, model.kv_heads // case.parallel.tensor)} KV heads of a rank and needs a ring"
    if model.head_gates is not None:
        yield f"{beyond}; head gates have none. {whole}"
    if any(model.window_of(layer) is not None for layer in range(model.num_layers)):
        yield f"{beyond}; sliding windows have none. {whole}"
    if model.attention_softcap is not None:
        yield f"{beyond}; soft-capped attention (model.attention_softcap) has none. {whole}"
    if model.attention_sinks:
        yield f"{beyond}; attention with trained sinks (model.attention_sinks) has none. {whole}"
    pieces = 2 * context
    if case.seq_len % pieces:
        near = case.seq_len // pieces * pieces or pieces
        yield f"{beyond} of two pieces per rank: data.seq_len={case.seq_len} must be a multiple of {pieces}. Use {near}, for example."


def _teacher(case: LayoutCase) -> Iterator[str]:
    """The divergence from a teacher is computed over whole rows of both heads."""
    needs = case.objective.needs
    is_taught = needs.stored_logits is not None or (
        needs.frozen is not None and needs.frozen.is_teacher
    )
    if is_taught and case.parallel.tensor > 1:
        yield (
            f"parallel.tensor is {case.parallel.tensor} and objective {case.objective.kind} compares whole vocabularies. "
            "Use tensor 1, and strategy fsdp to spread the weights over ranks."
        )


def _packed(case: LayoutCase) -> Iterator[str]:
    """A part of a quantised matrix is not the quantised part: scales cover elements of several ranks."""
    adapter, expert = case.adapter, case.parallel.expert
    if (
        adapter is not None
        and expert > 1
        and any(layout.experts is not None for layout in adapter.layouts(case.model).values())
    ):
        yield (
            f"parallel.expert is {expert} and adapter.base is {adapter.base}, which quantises the experts of a layer together. "
            "Use expert 1 and strategy fsdp to spread the weights over ranks, or set adapter.base to null."
        )
    if case.adapter is not None and case.adapter.base is not None and case.parallel.tensor > 1:
        yield (
            f"parallel.tensor is {case.parallel.tensor} and adapter.base is {case.adapter.base}, whose matrices are quantised whole. "
            "Use tensor 1 and strategy fsdp to spread the weights over ranks, or set adapter.base to null."
        )


RULES: tuple[Callable[[LayoutCase], Iterator[str]], ...] = (
    _wrapped,
    _experts,
    _pipeline,
    _tensor,
    _context,
    _packed,
    _teacher,
)

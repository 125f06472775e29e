"""Which layouts a run may have: a `LayoutCase` comes in, the broken rules go out.

Each rule names the nearest layout that works.

A rule refuses what would not equal one process. `headway train` raises the first broken rule before
anything starts; `headway plan` leaves out layouts that break one. Imports without torch.
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
    # Every degree divides 0, which therefore bounds nothing.
    largest = min([degree, *(number for number in must_divide if number)])
    return next(n for n in range(largest, 0, -1) if all(number % n == 0 for number in must_divide))


def _pipeline(case: LayoutCase) -> Iterator[str]:
    parallel = case.parallel
    layers = case.model.num_layers
    if parallel.virtual_stages is not None and parallel.schedule != "interleaved":
        yield (
            f"parallel.virtual_stages is {parallel.virtual_stages} and parallel.schedule is "
            f"{parallel.schedule}, which has one stage per rank. Use schedule interleaved, or "
            "remove virtual_stages."
        )
    if parallel.pipeline == 1:
        return
    shape = parallel.pipeline_shape
    stated = f"parallel.pipeline is {parallel.pipeline}"
    if parallel.strategy == "fsdp":
        yield (
            f"{stated} and parallel.strategy is fsdp, which shards every layer over all ranks. Use "
            "strategy zero1, or pipeline 1."
        )
    if shape.stages > layers:
        per_rank = ""
        if shape.virtual_stages > 1:
            per_rank = f" with {shape.virtual_stages} stages each"
        near = max(1, layers // shape.virtual_stages)
        yield (
            f"{stated}{per_rank}; every stage needs a layer, and the model has {layers}. Use "
            f"pipeline {near}."
        )
    if case.objective.needs.frozen is not None:
        yield (
            f"{stated} and objective {case.objective.kind} needs a reference model, which has no "
            "stages. Use pipeline 1."
        )
    split = parallel.pipeline_split
    if split and (len(split) != shape.stages or sum(split) != layers or min(split) < 1):
        yield (
            f"parallel.pipeline_split is {list(split)}; it must have {shape.stages} numbers, one "
            f"per stage, at least 1 each, whose sum is num_layers={layers}. Remove it for a split "
            "by cost."
        )


def _wrapped(case: LayoutCase) -> Iterator[str]:
    """A class of transformers is used as it is: headway does not know its layers."""
    if case.model.hf_config is None:
        return
    for axis in ("tensor", "pipeline", "context"):
        if getattr(case.parallel, axis) > 1:
            yield (
                f"parallel.{axis} is {getattr(case.parallel, axis)} and model.family is "
                f"transformers, whose layers headway cannot divide. Use {axis} 1, and strategy "
                "zero1 or fsdp."
            )


def _vision(case: LayoutCase) -> Iterator[str]:
    """Pictures of a row are read where the row is: ranks that share a row would need them cut."""
    if case.model.vision is None:
        return
    for axis in ("tensor", "pipeline", "context"):
        if getattr(case.parallel, axis) > 1:
            yield (
                f"parallel.{axis} is {getattr(case.parallel, axis)} and multimodal.native is "
                f"given, whose tower has no {axis} axis. Use {axis} 1, and strategy zero1 or fsdp."
            )


def _experts(case: LayoutCase) -> Iterator[str]:
    experts = case.model.experts
    expert = case.parallel.expert
    if experts is None:
        if expert > 1:
            yield (
                f"parallel.expert is {expert} and the model has no experts (model.experts is "
                "null). Use expert 1."
            )
        return
    if experts.num % expert:
        yield (
            f"parallel.expert is {expert}; it must divide model.experts.num={experts.num}. Use "
            f"{nearest(expert, experts.num)}."
        )
    for axis, size in (("pipeline", case.parallel.pipeline), ("context", case.parallel.context)):
        if size > 1:
            yield (
                f"parallel.{axis} is {size} and model.experts is given; mixtures of experts have "
                f"no {axis} axis. Use {axis} 1."
            )


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
        # It divides the heads, so it is not larger; 1 always works.
        largest = min(parallel.tensor, case.model.num_heads)
        fitting = next(n for n in range(largest, 0, -1) if not broken(n))
        yield f"{rule}. Use {fitting}."


def _context(case: LayoutCase) -> Iterator[str]:
    context = case.parallel.context
    model = case.model
    if context == 1:
        return
    stated = f"parallel.context is {context}"
    if model.state_section is not None:
        yield (
            f"{stated} and model.{model.state_section[0]} is given: its state passes through a whole row, "
            "which a rank does not have. Use context 1."
        )
    ring = ring_ranks(context, model.kv_heads, case.parallel.tensor)
    if ring > 1:
        yield from _ring(case, stated, ring)
    if case.seq_len % context:
        near = case.seq_len // context * context or context
        yield (
            f"{stated}; it must divide data.seq_len={case.seq_len}. Use seq_len {near}, for "
            "example."
        )
    # Below that length the factors of longrope are the same for every document.
    scaling = model.rope_scaling
    if (
        scaling is not None
        and scaling.kind == "longrope"
        and case.seq_len > scaling.original_max_seq_len
    ):
        yield (
            f"{stated} and data.seq_len={case.seq_len} is above "
            f"rope_scaling.original_max_seq_len={scaling.original_max_seq_len}: longrope depends "
            "on the length of whole documents, which a rank does not see. Use context 1."
        )
    if case.objective.needs.whole_rows:
        yield f"objective {case.objective.kind} needs whole rows: {stated} and must be 1."
    rates = {"model.dropout": model.dropout}
    if case.adapter is not None:
        rates["adapter.dropout"] = case.adapter.dropout
    for key, rate in rates.items():
        if rate:
            yield (
                f"{stated} and {key} is {rate}, which would drop the same elements on all ranks of "
                "a row. Set the dropout to 0."
            )


def _ring(case: LayoutCase, stated: str, ring: int) -> Iterator[str]:
    """Context ranks beyond the KV heads pass keys around a ring.

    That is exact for full causal attention only.
    """
    context = case.parallel.context
    model = case.model
    largest = context // ring
    remedy = f"Use {largest}."
    if largest > 2:
        remedy = f"Use {largest} or another divisor of {largest}."
    beyond = (
        f"{stated}, which is beyond the {max(1, model.kv_heads // case.parallel.tensor)} KV heads "
        "of a rank and needs a ring"
    )
    if model.head_gates is not None:
        yield f"{beyond}; head gates have none. {remedy}"
    if any(model.window_of(layer) is not None for layer in range(model.num_layers)):
        yield f"{beyond}; sliding windows have none. {remedy}"
    if model.attention_softcap is not None:
        yield f"{beyond}; soft-capped attention (model.attention_softcap) has none. {remedy}"
    if model.attention_sinks:
        yield f"{beyond}; attention with trained sinks (model.attention_sinks) has none. {remedy}"
    # Every rank has a chunk from the front and one from the back of a row, so that all have the
    # same amount of causal work (ring.py).
    pieces = 2 * context
    if case.seq_len % pieces:
        near = case.seq_len // pieces * pieces or pieces
        yield (
            f"{beyond} of two pieces per rank: data.seq_len={case.seq_len} must be a multiple of "
            f"{pieces}. Use {near}, for example."
        )


def _teacher(case: LayoutCase) -> Iterator[str]:
    """The divergence from a teacher is computed over whole rows of both heads."""
    needs = case.objective.needs
    is_taught = needs.stored_logits is not None or (
        needs.frozen is not None and needs.frozen.is_teacher
    )
    if is_taught and case.parallel.tensor > 1:
        yield (
            f"parallel.tensor is {case.parallel.tensor} and objective {case.objective.kind} "
            "compares whole vocabularies. Use tensor 1, and strategy fsdp to spread the weights "
            "over ranks."
        )


def _packed(case: LayoutCase) -> Iterator[str]:
    """A quantised matrix cannot be split: its scales would cover elements of several ranks."""
    adapter = case.adapter
    expert = case.parallel.expert
    if adapter is None:
        return
    if expert > 1 and any(
        layout.experts is not None for layout in adapter.layouts(case.model).values()
    ):
        yield (
            f"parallel.expert is {expert} and adapter.base is {adapter.base}, which quantises the "
            "experts of a layer together. Use expert 1 and strategy fsdp to spread the weights "
            "over ranks, or set adapter.base to null."
        )
    if adapter.base is not None and case.parallel.tensor > 1:
        yield (
            f"parallel.tensor is {case.parallel.tensor} and adapter.base is {adapter.base}, "
            "whose matrices are quantised whole. Use tensor 1 and strategy fsdp to spread the "
            "weights over ranks, or set adapter.base to null."
        )


# Rules that leave no layer to divide come first: `headway train` shows the first broken one, and the
# remedies of the others are for layers that can be divided.
RULES: tuple[Callable[[LayoutCase], Iterator[str]], ...] = (
    _wrapped,
    _vision,
    _experts,
    _pipeline,
    _tensor,
    _context,
    _packed,
    _teacher,
)

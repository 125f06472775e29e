"""Which layouts are best: a job comes in; the fastest layouts that fit, or the nearest that fit, go
out. Nothing imports torch.

The batch stays the same: rows of a step over all ranks. What varies: strategy and shard size,
tensor, pipeline with its schedule, context, expert, rows of a microbatch and recomputation. Layouts
that break a rule or do not fit are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import log2

from headway.parallel.layouts import Layout, LayoutShape, broken_sizes, divisors_of
from headway.parallel.pipeline_order import ScheduleName
from headway.plan.job import PlanJob
from headway.plan.memory import estimate
from headway.plan.result import Plan, make_plan

SHORT_LIST = 16
"""Pipelines that are simulated; the others are compared with the bubble of equal stages."""
MAX_ROWS = 64
"""Rows of a microbatch that are tried at most."""
MAX_PIPELINE = 16
"""Pipeline ranks that are tried at most, unless the recipe has more."""
SIZES_PER_LAYOUT = 2
"""Of each layout the largest microbatches that fit, and the next smaller ones: larger is not always
faster in a pipeline."""
LONG_ROWS = 16_384
"""Rows are shared by context ranks from this length on, or where the recipe does so."""
RECOMPUTE: tuple[float | str, ...] = ("none", "selective", 1.0)


@dataclass(frozen=True)
class SearchSpace:
    """The layouts and recomputations that are tried."""

    layouts: tuple[Layout, ...]
    recompute: tuple[float | str, ...] = RECOMPUTE


def best_plans(job: PlanJob, count: int = 10) -> list[Plan]:
    """The fastest layouts for the job's number of ranks, batch and GPU."""
    candidates = [
        make_plan(candidate, simulated=False) for candidate in fitting_jobs(job, _space(job))
    ]
    candidates.sort(key=lambda plan: -plan.per_gpu)

    # Simulating a pipeline takes long: only those at the top of the list are worth it.
    plans: list[Plan] = []
    for plan in _varied(candidates)[:SHORT_LIST]:
        if plan.job.layout.pipeline > 1:
            plan = make_plan(plan.job)
        plans.append(plan)
    plans.sort(key=lambda plan: -plan.per_gpu)
    return plans[:count]


def _varied(plans: list[Plan]) -> list[Plan]:
    """Of every layout of axes the fastest, so that a list does not repeat one with other rows."""
    fastest: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        fastest.setdefault((plan.job.layout, plan.job.memory.recompute), plan)
    return list(fastest.values())


def nearest_fitting(job: PlanJob, count: int = 3) -> list[Plan]:
    """The layouts that fit and differ least from the job's."""

    def distance(other: PlanJob) -> float:
        """Doublings of every axis, one for each other choice, half of one for a doubling of
        rows."""
        old = job.layout
        new = other.layout
        axes = sum(
            abs(log2(getattr(new, axis) / getattr(old, axis)))
            for axis in ("tensor", "pipeline", "context", "expert", "shards")
        )
        choices = (
            (new.strategy != old.strategy)
            + (new.schedule != old.schedule)
            + (other.memory.recompute != job.memory.recompute)
        )
        return axes + choices + 0.5 * abs(log2(other.rows / job.rows))

    chosen: list[PlanJob] = []
    for candidate in sorted(fitting_jobs(job, _space(job)), key=distance):
        is_known = any(
            candidate.layout == other.layout and candidate.memory == other.memory
            for other in chosen
        )
        if not is_known:
            chosen.append(candidate)
        if len(chosen) == count:
            break
    return [make_plan(candidate) for candidate in chosen]


def fitting_jobs(job: PlanJob, space: SearchSpace) -> Iterator[PlanJob]:
    """Every job of a space that breaks no rule and fits into memory; of a layout only the largest
    microbatches that fit."""
    # The rows of a step are those of the recipe: a plan never changes what is learned.
    rows = job.rows * job.accumulate * job.layout.data
    for layout in space.layouts:
        if rows % layout.data or (job.allows is not None and not job.allows(layout)):
            continue
        rank_rows = rows // layout.data
        largest_first = [n for n in range(min(rank_rows, MAX_ROWS), 0, -1) if rank_rows % n == 0]
        for recompute in space.recompute:
            if recompute == "selective" and layout.expert > 1:
                continue  # refused by training
            memory = job.memory.model_copy(update={"recompute": recompute})
            # Lazy: smaller microbatches are not estimated once two sizes fit.
            fitting = (
                candidate
                for micro_rows in largest_first
                if _fits(
                    candidate := job.varied(layout, micro_rows, rank_rows // micro_rows, memory)
                )
            )
            yield from islice(fitting, SIZES_PER_LAYOUT)


def _fits(job: PlanJob) -> bool:
    """Whether the ranks that need the most memory have enough of it."""
    # The first pipeline rank holds the most microbatches, the last has the head.
    ends = {0, job.layout.pipeline - 1}
    return all(estimate(job.memory_job(rank)).total <= job.usable_bytes for rank in ends)


def _space(job: PlanJob) -> SearchSpace:
    """All layouts worth a look, and the recomputation of the recipe beside the usual ones."""
    if job.memory.recompute in RECOMPUTE:
        recompute = RECOMPUTE
    else:
        recompute = (*RECOMPUTE, job.memory.recompute)
    return SearchSpace(tuple(layouts_of(job)), recompute)


def layouts_of(job: PlanJob) -> Iterator[Layout]:
    """All layouts worth a look: tensor inside a node, shards over a node or everything."""
    world = job.layout.world
    node = job.gpu.gpus_per_node
    model = job.model
    shape = LayoutShape(model, job.seq_len)
    divisors = divisors_of(world)

    # Tensor parallelism exchanges in every layer and needs the links inside a node; context ranks
    # too, unless the recipe says otherwise.
    shares_rows = job.seq_len >= LONG_ROWS or job.layout.context > 1
    tensors = [n for n in divisors if n <= node]
    contexts = [
        n for n in divisors if n == 1 or (shares_rows and n <= max(node, job.layout.context))
    ]
    pipelines = [
        n for n in divisors if n <= min(model.num_layers, max(MAX_PIPELINE, job.layout.pipeline))
    ]

    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if world % (tensor * context * pipeline) or (
            context > 1 and context * tensor > max(node, job.layout.context)
        ):
            continue
        axes = Layout(
            world, tensor=tensor, sequence=job.layout.sequence, pipeline=pipeline, context=context
        )
        experts = [
            n for n in divisors if model.experts is not None and n > 1 and axes.data % n == 0
        ]
        for schedule, virtual in _schedules(pipeline, model.num_layers):
            base = replace(axes, schedule=schedule, virtual_stages=virtual)
            for sharded in _sharded(base, node):
                layouts = [sharded, *(replace(sharded, expert=expert) for expert in experts)]
                for layout in layouts:
                    if not any(broken_sizes(layout, shape)):
                        yield layout


def _schedules(pipeline: int, layers: int) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules and stages per rank. Interleaving needs a layer for every stage."""
    yield "1f1b", 1
    if pipeline > 1:
        yield "zero_bubble", 1
        if layers >= 2 * pipeline:
            yield "interleaved", 2


def _sharded(base: Layout, node: int) -> Iterator[Layout]:
    """zero1 over all ranks, over a node, or none (ddp); fsdp over all or over a node."""
    inside = max(1, node // base.tensor)
    yield base
    if base.reduce > 1:
        yield replace(base, shard=1)
    if 1 < inside < base.reduce and base.reduce % inside == 0:
        yield replace(base, shard=inside)
    # fsdp has no pipeline (parallel/layouts.py).
    if base.pipeline == 1 and base.reduce > 1:
        yield replace(base, strategy="fsdp")
        if 1 < inside < base.reduce and base.reduce % inside == 0:
            yield replace(base, strategy="fsdp", shard=inside)

"""Which layouts are best: a job comes in; the fastest layouts that fit, or the nearest that fit, go out. Nothing imports torch.

The batch stays the same: rows of a step over all ranks. What varies: strategy and shard size, tensor, pipeline with its schedule, context,
expert, rows of a microbatch and recomputation. Layouts that break a rule or do not fit are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log2

from headway.parallel.layouts import Layout, LayoutShape, broken_sizes, divisors_of
from headway.parallel.pipeline_order import ScheduleName
from headway.plan.job import PlanJob
from headway.plan.memory import estimate
from headway.plan.result import Plan, make_plan

SHORT_LIST = 16
"""Pipelines that are simulated; the others are compared with the bubble of equal stages."""
MAX_ROWS = 64
MAX_PIPELINE = 16
LONG_ROWS = 16_384
"""Rows are shared by context ranks from this length on, or where the recipe does so."""
RECOMPUTE: tuple[float | str, ...] = ("none", "selective", 1.0)


@dataclass(frozen=True)
class SearchSpace:
    """What may vary."""

    layouts: tuple[Layout, ...]
    recompute: tuple[float | str, ...] = RECOMPUTE


def best_plans(job: PlanJob, count: int = 10) -> list[Plan]:
    """The fastest layouts for the job's number of ranks, batch and GPU."""
    found = [make_plan(one, simulated=False) for one in fitting_jobs(job, _space(job))]
    found.sort(key=lambda plan: -plan.per_gpu)
    exact = [
        make_plan(plan.job) if plan.job.layout.pipeline > 1 else plan
        for plan in _varied(found)[:SHORT_LIST]
    ]
    exact.sort(key=lambda plan: -plan.per_gpu)
    return exact[:count]


def _varied(plans: list[Plan]) -> list[Plan]:
    """Of every layout of axes the fastest, so that a list does not repeat one with other rows."""
    seen: set[tuple[object, ...]] = set()
    found: list[Plan] = []
    for plan in plans:
        layout = plan.job.layout
        key = (layout, plan.job.memory.recompute)
        if key not in seen:
            seen.add(key)
            found.append(plan)
    return found


def nearest_fitting(job: PlanJob, count: int = 3) -> list[Plan]:
    """The layouts that fit and differ least from the job's."""

    def distance(other: PlanJob) -> float:
        mine, its = job.layout, other.layout
        axes = sum(
            abs(log2(getattr(its, axis) / getattr(mine, axis)))
            for axis in ("tensor", "pipeline", "context", "expert", "shards")
        )
        changed = (
            (its.strategy != mine.strategy)
            + (its.schedule != mine.schedule)
            + (other.memory.recompute != job.memory.recompute)
        )
        return axes + changed + 0.5 * abs(log2(other.rows / job.rows))

    jobs = sorted(fitting_jobs(job, _space(job)), key=distance)
    chosen: list[PlanJob] = []
    for one in jobs:
        if not any(one.layout == other.layout and one.memory == other.memory for other in chosen):
            chosen.append(one)
        if len(chosen) == count:
            break
    return [make_plan(one) for one in chosen]


def fitting_jobs(job: PlanJob, space: SearchSpace) -> Iterator[PlanJob]:
    """Every job of a space that breaks no rule and fits into memory; of a layout only the largest microbatches that fit."""
    rows = job.rows * job.accumulate * job.layout.data
    for layout in space.layouts:
        if rows % layout.data or (job.allows is not None and not job.allows(layout)):
            continue
        each = rows // layout.data
        for recompute in space.recompute:
            if recompute == "selective" and layout.expert > 1:
                continue  # refused by training
            memory = job.memory.model_copy(update={"recompute": recompute})
            found = 0
            for micro in sorted(
                (n for n in range(1, min(each, MAX_ROWS) + 1) if each % n == 0), reverse=True
            ):
                one = job.varied(layout, micro, each // micro, memory)
                # the first rank holds the most microbatches, the last has the head
                if all(
                    estimate(one.memory_job(rank)).total <= job.usable_bytes
                    for rank in {0, layout.pipeline - 1}
                ):
                    yield one
                    found += 1
                    if found == 2:
                        break


def _space(job: PlanJob) -> SearchSpace:
    recompute = (
        RECOMPUTE if job.memory.recompute in RECOMPUTE else (*RECOMPUTE, job.memory.recompute)
    )
    return SearchSpace(tuple(layouts_of(job)), recompute)


def layouts_of(job: PlanJob) -> Iterator[Layout]:
    """All layouts worth a look: tensor inside a node, shards over a node or everything."""
    world, node, model = job.layout.world, job.gpu.gpus_per_node, job.model
    shape = LayoutShape(model, job.seq_len)
    divisors = divisors_of(world)
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
            for one in _sharded(base, node):
                split = (replace(one, expert=expert) for expert in experts)
                yield from (
                    layout for layout in (one, *split) if not any(broken_sizes(layout, shape))
                )


def _schedules(pipeline: int, layers: int) -> Iterator[tuple[ScheduleName, int]]:
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
    if base.pipeline == 1 and base.reduce > 1:
        yield replace(base, strategy="fsdp")
        if 1 < inside < base.reduce and base.reduce % inside == 0:
            yield replace(base, strategy="fsdp", shard=inside)

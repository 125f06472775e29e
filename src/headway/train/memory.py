"""Memory of a run: the estimate of what it needs, the error when it runs out, and the largest microbatch that fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headway.errors import ConfigError, TrainingError, first_line
from headway.optim.adamw import Config as AdamWConfig
from headway.parallel.assemble import group_parameters, meta_model, whole_specs
from headway.parallel.engine import EngineSpec
from headway.parallel.memory_probe import Probe, is_out_of_memory, make_probe, run_probe
from headway.parallel.update_rules import state_bytes
from headway.plan.hardware import USABLE
from headway.plan.job import PlanJob
from headway.plan.memory import GIB, MemoryJob, amount, estimate, suggestions
from headway.runtime.machine import ram_bytes
from headway.runtime.process import ChildFailureError
from headway.train.planning import layout_of, reference_model

if TYPE_CHECKING:
    from headway.data.batch import StepBatch
    from headway.data.config import ResolvedBatch
    from headway.model.config import ModelConfig
    from headway.parallel.collectives import RankGroup
    from headway.runtime.device import Compute
    from headway.train.config import Recipe

log = logging.getLogger("headway")

SPARE_RAM = 0.8
"""Share of the free RAM that a run on the CPU is planned into."""


class OutOfMemoryError(TrainingError):
    """Memory ran out. The message says what needs it and which settings would need less."""


def describe_job(
    recipe: Recipe, model: ModelConfig, compute: Compute, batch: ResolvedBatch, num_ranks: int
) -> MemoryJob:
    """What decides the memory of the rank that needs the most; the same numbers as `headway plan`'s."""
    spec = EngineSpec(
        model,
        recipe.objective,
        recipe.optim,
        freeze=recipe.freeze,
        train=recipe.train,
        adapter=recipe.adapter,
    )
    specs = whole_specs(meta_model(spec), recipe.objective.build())
    groups = group_parameters(specs, spec)
    specs = {name: one for name, one in specs.items() if "objective" not in one.groups}
    shapes = {name: one.shape for name, one in specs.items()}
    on_cuda, size = compute.device.type == "cuda", compute.dtype.itemsize
    other_state, shards = (
        state_bytes(recipe.optim, groups, shapes),
        recipe.parallel.mesh(0, num_ranks).shard,
    )
    if recipe.optim.kind == "schedule_free" and (
        (size == 4 and shards == 1) or recipe.parallel.strategy == "fsdp"
    ):
        other_state += 4.0  # averages are apart from what trains, also where masters are the parameters themselves
    job = PlanJob(
        model=model,
        seq_len=recipe.data.seq_len,
        rows=batch.micro_rows,
        accumulate=batch.accumulate,
        layout=layout_of(recipe.parallel, num_ranks),
        precision=compute.precision,
        memory=recipe.memory,
        specs=specs,
        training=frozenset(name for group in groups for name in group.names if name in shapes),
        state_dtype=recipe.optim.state_dtype if isinstance(recipe.optim, AdamWConfig) else "fp32",
        other_state_bytes=None if isinstance(recipe.optim, AdamWConfig) else other_state,
        grad_bytes=4 if recipe.parallel.accumulate_dtype == "fp32" else size,
        bucket_bytes=recipe.parallel.bucket_bytes,
        pipeline_split=recipe.parallel.pipeline_split,
        reference=reference_model(recipe, model),
    )
    compiled = on_cuda if recipe.kernels.compile == "auto" else recipe.kernels.compile
    chunk_tokens = recipe.memory.chunk_tokens(on_cuda=on_cuda)
    ranks = [
        replace(
            job.memory_job(rank),
            compute_bytes=size,
            compiled=compiled,
            on_cuda=on_cuda,
            chunk_tokens=chunk_tokens,
        )
        for rank in range(job.layout.pipeline)
    ]
    return max(ranks, key=lambda rank: estimate(rank).total)


def memory_limit(recipe: Recipe, device: torch.device) -> int | None:
    """Bytes this rank may use: what the recipe says, else what the device has; None where that is not known."""
    if recipe.memory.limit_gib is not None:
        return int(recipe.memory.limit_gib * GIB)
    if device.type == "cuda":
        return int(USABLE * torch.cuda.get_device_properties(device).total_memory)
    free = ram_bytes()[1]
    return None if free is None else int(SPARE_RAM * free)


def apply_limit(recipe: Recipe, job: MemoryJob, device: torch.device) -> None:
    """Apply memory.limit_gib: to the allocator on CUDA, to the estimate on the CPU."""
    if recipe.memory.limit_gib is None:
        return
    wanted = recipe.memory.limit_gib * GIB
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, wanted / torch.cuda.get_device_properties(device).total_memory), device
        )
    elif estimate(job).total > wanted:
        raise OutOfMemoryError(f"memory.limit_gib is {recipe.memory.limit_gib:g}. {explain(job)}")


def check_host_memory(job: MemoryJob, ranks_here: int) -> None:
    """Refuse an offload that does not fit into this machine's memory; otherwise the kernel would kill the run."""
    wanted, free = estimate(job).host * ranks_here, ram_bytes()[1]
    if job.on_cuda and free is not None and wanted > USABLE * free:
        raise ConfigError(
            f"memory.offload is [{', '.join(job.memory.offload)}]; the {ranks_here} ranks on this machine need {amount(wanted)} "
            f"of host memory, and {amount(free)} is free. Offload less, use optim.state_dtype=8bit, or use more machines."
        )


def explain(job: MemoryJob) -> str:
    """What a step needs by kind, and which settings would need less; one line."""
    found = estimate(job)
    less = [f"{name} would free {amount(freed)}" for name, freed in suggestions(job)]
    if less:
        advice = f" {'; '.join(less)}."
    elif job.on_cuda:
        advice = " No setting would free much; use a smaller model or more ranks."
    else:
        # more ranks on this machine would share the same memory
        advice = " No setting would free much; use a smaller model, a shorter data.seq_len, or a machine with more memory."
    return (
        f"A step needs an estimated {amount(found.total)} on this rank: {found.describe()}.{advice}"
    )


@contextmanager
def explain_out_of_memory(
    job: Callable[[], MemoryJob], device: Callable[[], torch.device]
) -> Iterator[None]:
    """Turn running out of memory into one error: bytes by kind, and how much each setting would free."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place = device()
        usage = ""
        if place.type == "cuda":
            free, whole = torch.cuda.mem_get_info(place)
            usage = f" ({amount(torch.cuda.max_memory_allocated(place))} allocated at the peak, {amount(free)} of {amount(whole)} free)"
        elif place.type == "cpu":
            total, left = ram_bytes()
            if total is not None and left is not None:
                usage = f" ({amount(left)} of {amount(total)} of this machine's memory free)"
        message = (
            f"out of memory on {place.type}{usage}: {first_line(error, 160)}. {explain(job())}"
        )
    else:
        return
    raise OutOfMemoryError(message)


def choices(rows_per_rank: int) -> list[int]:
    """The sizes of a microbatch that divide the rows of a rank, smallest first."""
    return [n for n in range(1, rows_per_rank + 1) if rows_per_rank % n == 0]


def fit_by_estimate(job: MemoryJob, sizes: Sequence[int], limit: int | None) -> int:
    """The largest microbatch whose estimate is within a limit; the smallest if none is."""
    whole = job.rows * job.accumulate
    fitting = [
        n
        for n in sizes
        if limit is None or estimate(replace(job, rows=n, accumulate=whole // n)).total <= limit
    ]
    return max(fitting, default=sizes[0])


def fit_micro_rows(
    recipe: Recipe,
    job: MemoryJob,
    spec: EngineSpec,
    ranks: RankGroup,
    first_step: Callable[[], StepBatch],
) -> int:
    """Rows of the largest microbatch that fits, the same on all ranks: on CUDA measured in a separate process, on the CPU estimated.

    The engine must not exist yet: on CUDA the process that measures needs its memory.
    """
    sizes, limit = choices(job.rows * job.accumulate), memory_limit(recipe, spec.device)
    if (
        spec.device.type == "cuda" and spec.ranks.pipeline.size == 1
    ):  # stages cannot be measured alone
        assert limit is not None
        found, how = (
            _measure(
                make_probe(spec, first_step(), sizes, limit - _freed(spec.device)),
                recipe.parallel.timeout_seconds,
            ),
            "measured",
        )
    else:
        found, how = fit_by_estimate(job, sizes, limit), "estimated"
    chosen = min(ranks.gather(found))
    within = "" if limit is None else f" into {amount(limit)}"
    log.info(
        "batch.micro_rows=auto: %d rows per microbatch fit%s (%s); the batch of %d rows per rank stays",
        chosen,
        within,
        how,
        sizes[-1],
    )
    return chosen


def _freed(device: torch.device) -> int:
    """Give cached memory back to the device; returns the bytes that this process still holds, such as a reference model."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _measure(probe: Probe, timeout_seconds: float) -> int:
    """What fits on this rank; the smallest size where that cannot be found out."""
    try:
        return run_probe(probe, timeout_seconds / 2)  # the other ranks wait for the answer
    except ChildFailureError as problem:
        log.warning(
            "batch.micro_rows=auto: measuring memory failed (%s); using %d row per microbatch. Set batch.micro_rows for another size.",
            problem,
            probe.sizes[0],
        )
        return probe.sizes[0]

"""Memory of a run: the estimate of what it needs, the error when it runs out, and the largest
microbatch that fits.
"""

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
from headway.parallel.update_rules import state_bytes
from headway.plan.hardware import USABLE
from headway.plan.job import PlanJob
from headway.plan.memory import GIB, MemoryJob, amount, estimate, suggestions
from headway.runtime.device import is_out_of_memory
from headway.runtime.machine import ram_bytes
from headway.runtime.process import ChildFailureError
from headway.train.planning import (
    assumed_lengths,
    layout_of,
    lengths_of,
    reference_model,
    rollout_shape,
    sampler_copy,
)

if TYPE_CHECKING:
    from headway.data.batch import StepBatch
    from headway.data.config import ResolvedBatch
    from headway.data.open import OpenData
    from headway.model.config import ModelConfig
    from headway.parallel.collectives import RankGroup
    from headway.parallel.memory_probe import Probe
    from headway.runtime.device import Compute
    from headway.train.config import Recipe

log = logging.getLogger("headway")

FP32_BYTES = 4
SPARE_RAM = 0.8
"""Share of the free RAM that a run on the CPU is planned into."""


class OutOfMemoryError(TrainingError):
    """Memory ran out. The message says what needs it and which settings would need less."""


def describe_job(
    recipe: Recipe,
    model: ModelConfig,
    compute: Compute,
    batch: ResolvedBatch,
    num_ranks: int,
    data: OpenData | None = None,
) -> MemoryJob:
    """What decides the memory of the rank that needs the most.

    The same numbers as `headway plan`'s. `data`: what the run has opened, where it has; prompts
    that are answered have their lengths there.
    """
    spec = EngineSpec(
        model,
        recipe.objective,
        recipe.optim,
        freeze=recipe.freeze,
        train=recipe.train,
        adapter=recipe.adapter,
    )
    all_specs = whole_specs(meta_model(spec), recipe.objective.build())
    groups = group_parameters(all_specs, spec)
    # The parameters of a task are few, and the estimate knows those of models alone.
    specs = {name: param for name, param in all_specs.items() if "objective" not in param.groups}
    shapes = {name: param.shape for name, param in specs.items()}
    on_cuda = compute.device.type == "cuda"
    compute_bytes = compute.dtype.itemsize

    # AdamW's state is part of the estimate, by its dtype; that of other optimizers is counted here.
    state_dtype = "fp32"
    other_state_bytes = None
    if isinstance(recipe.optim, AdamWConfig):
        state_dtype = recipe.optim.state_dtype
    else:
        other_state_bytes = state_bytes(recipe.optim, groups, shapes)
        # Averages of schedule-free are apart from the weights that train. Where fp32 parameters
        # are their own masters, and with FSDP, they are one more copy.
        shards = recipe.parallel.mesh(0, num_ranks).shard
        are_masters = compute_bytes == FP32_BYTES and shards == 1
        if recipe.optim.kind == "schedule_free" and (
            are_masters or recipe.parallel.strategy == "fsdp"
        ):
            other_state_bytes += FP32_BYTES

    grad_bytes = compute_bytes
    if recipe.parallel.accumulate_dtype == "fp32":
        grad_bytes = FP32_BYTES
    layout = layout_of(recipe.parallel, num_ranks)
    accumulate = batch.accumulate
    sampler = None
    rollout = None
    if recipe.objective.needs.rollouts:
        lengths = assumed_lengths(recipe, model)
        if data is not None:
            lengths = lengths_of(data)
        sampler = sampler_copy(recipe, model, lengths)
        rollout = rollout_shape(recipe, lengths)
        accumulate = rollout.microbatches(recipe.data.seq_len, batch.micro_rows, layout.data)
    job = PlanJob(
        model=model,
        seq_len=recipe.data.seq_len,
        rows=batch.micro_rows,
        accumulate=accumulate,
        layout=layout,
        precision=compute.precision,
        memory=recipe.memory,
        specs=specs,
        training=frozenset(name for group in groups for name in group.names if name in shapes),
        state_dtype=state_dtype,
        other_state_bytes=other_state_bytes,
        grad_bytes=grad_bytes,
        bucket_bytes=recipe.parallel.bucket_bytes,
        pipeline_split=recipe.parallel.pipeline_split,
        reference=reference_model(recipe, model),
        sampler=sampler,
        rollout=rollout,
    )

    # `plan` assumes a GPU; here the device is known.
    compiled = recipe.kernels.compile
    if compiled == "auto":
        compiled = on_cuda
    # Ranks differ in their pipeline stages alone.
    jobs = [
        replace(
            job.memory_job(stage),
            compute_bytes=compute_bytes,
            compiled=compiled,
            on_cuda=on_cuda,
            chunk_tokens=recipe.memory.chunk_tokens(on_cuda=on_cuda),
        )
        for stage in range(job.layout.pipeline)
    ]
    return max(jobs, key=lambda stage_job: estimate(stage_job).total)


def memory_limit(recipe: Recipe, device: torch.device) -> int | None:
    """Bytes this rank may use: what the recipe says, else what the device has.

    None where that is not known.
    """
    if recipe.memory.limit_gib is not None:
        return int(recipe.memory.limit_gib * GIB)
    if device.type == "cuda":
        return int(USABLE * torch.cuda.get_device_properties(device).total_memory)
    # On the CPU, and on Apple's GPUs, which share the memory of the machine.
    free = ram_bytes()[1]
    if free is None:
        return None
    return int(SPARE_RAM * free)


def apply_limit(recipe: Recipe, job: MemoryJob, device: torch.device) -> None:
    """Apply memory.limit_gib: to the allocator on CUDA, to the estimate on the CPU."""
    if recipe.memory.limit_gib is None:
        return
    limit = recipe.memory.limit_gib * GIB
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    elif estimate(job).total > limit:
        raise OutOfMemoryError(f"memory.limit_gib is {recipe.memory.limit_gib:g}. {explain(job)}")


def check_host_memory(job: MemoryJob, ranks_here: int) -> None:
    """Refuse an offload that does not fit into this machine's memory.

    Otherwise the kernel would kill the run.
    """
    needed = estimate(job).host * ranks_here
    free = ram_bytes()[1]
    if job.on_cuda and free is not None and needed > USABLE * free:
        raise ConfigError(
            f"memory.offload is [{', '.join(job.memory.offload)}]; "
            f"the {ranks_here} ranks on this machine need {amount(needed)} of host memory, "
            f"and {amount(free)} is free. "
            "Offload less, use optim.state_dtype=8bit, or use more machines."
        )


def explain(job: MemoryJob) -> str:
    """What a step needs by kind, and which settings would need less; one line."""
    needed = estimate(job)
    less = [f"{name} would free {amount(freed)}" for name, freed in suggestions(job)]
    if less:
        advice = f" {'; '.join(less)}."
    elif job.on_cuda:
        advice = " No setting would free much; use a smaller model or more ranks."
    else:
        # More ranks on this machine would share the same memory.
        advice = (
            " No setting would free much; use a smaller model, a shorter data.seq_len, "
            "or a machine with more memory."
        )
    return (
        f"A step needs an estimated {amount(needed.total)} on this rank: "
        f"{needed.describe()}.{advice}"
    )


@contextmanager
def explain_out_of_memory(
    job: Callable[[], MemoryJob], device: Callable[[], torch.device]
) -> Iterator[None]:
    """Turn running out of memory into one error.

    It has bytes by kind, and how much each setting would free.
    """
    # The error is raised outside of `except`: a chained one would keep the tensors of its frames.
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed_device = device()
        usage = ""
        if failed_device.type == "cuda":
            free, device_total = torch.cuda.mem_get_info(failed_device)
            usage = (
                f" ({amount(torch.cuda.max_memory_allocated(failed_device))} allocated at the "
                f"peak, {amount(free)} of {amount(device_total)} free)"
            )
        elif failed_device.type == "cpu":
            ram_total, ram_free = ram_bytes()
            if ram_total is not None and ram_free is not None:
                usage = (
                    f" ({amount(ram_free)} of {amount(ram_total)} of this machine's memory free)"
                )
        message = (
            f"out of memory on {failed_device.type}{usage}: {first_line(error, 160)}. "
            f"{explain(job())}"
        )
    else:
        return
    raise OutOfMemoryError(message)


def choices(rows_per_rank: int) -> list[int]:
    """The sizes of a microbatch that divide the rows of a rank, smallest first."""
    return [size for size in range(1, rows_per_rank + 1) if rows_per_rank % size == 0]


def fit_by_estimate(job: MemoryJob, sizes: Sequence[int], limit: int | None) -> int:
    """The largest microbatch whose estimate is within a limit; the smallest if none is."""
    if limit is None:
        return max(sizes)
    rows_per_rank = job.rows * job.accumulate
    fitting = [
        size
        for size in sizes
        if estimate(replace(job, rows=size, accumulate=rows_per_rank // size)).total <= limit
    ]
    return max(fitting, default=sizes[0])


def fit_micro_rows(
    recipe: Recipe,
    job: MemoryJob,
    spec: EngineSpec,
    ranks: RankGroup,
    first_step: Callable[[], StepBatch],
) -> int:
    """Rows of the largest microbatch that fits, the same on all ranks.

    On CUDA they are measured in a separate process, on the CPU estimated. The engine must not
    exist yet: on CUDA the process that measures needs its memory.
    """
    sizes = choices(job.rows * job.accumulate)
    limit = memory_limit(recipe, spec.device)
    # Stages of a pipeline cannot be measured alone.
    if spec.device.type == "cuda" and spec.ranks.pipeline.size == 1:
        from headway.parallel.memory_probe import make_probe

        assert limit is not None
        probe = make_probe(spec, first_step(), sizes, limit - _freed(spec.device))
        rows = _measure(probe, recipe.parallel.timeout_seconds)
        method = "measured"
    else:
        rows = fit_by_estimate(job, sizes, limit)
        method = "estimated"
    # Microbatches are the same everywhere, so the rank with the least room decides.
    chosen = min(ranks.gather(rows))
    within = ""
    if limit is not None:
        within = f" into {amount(limit)}"
    log.info(
        "batch.micro_rows=auto: %d rows per microbatch fit%s (%s); "
        "the batch of %d rows per rank stays",
        chosen,
        within,
        method,
        sizes[-1],
    )
    return chosen


def _freed(device: torch.device) -> int:
    """Give cached memory back to the device.

    Returns the bytes that this process still holds, such as a reference model.
    """
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def _measure(probe: Probe, timeout_seconds: float) -> int:
    """What fits on this rank; the smallest size where that cannot be found out."""
    from headway.parallel.memory_probe import run_probe

    try:
        # Other ranks wait for the answer, and lose patience after the whole time.
        return run_probe(probe, timeout_seconds / 2)
    except ChildFailureError as problem:
        log.warning(
            "batch.micro_rows=auto: measuring memory failed (%s); using %d row per microbatch. "
            "Set batch.micro_rows for another size.",
            problem,
            probe.sizes[0],
        )
        return probe.sizes[0]

"""Finds the largest microbatch that fits on a GPU, in a separate process.

In: an EngineSpec, rows of data, a limit; out: a row count.

The child process builds the engine of this rank and measures forward, backward and update. Nothing
of it is left afterwards: the parent's memory, its random numbers and its process groups are not
touched, and a trial may run out of memory anywhere.

Other ranks are simulated by torch's fake process group: collectives return at once, tensors have
the sizes they have in training, values mean nothing. What this does not measure: buffers of NCCL
and fragmentation over many steps. The limit leaves room for them, and the child itself needs a
second CUDA context, so the answer tends to be too small rather than too large.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from headway.data.batch import TENSOR_FIELDS, Batch, StepBatch
from headway.optim.base import Hyper
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroup, RankGroups, form_groups
from headway.parallel.engine import Engine, EngineSpec
from headway.parallel.mesh import Mesh
from headway.runtime.device import is_out_of_memory, set_arithmetic
from headway.runtime.process import run_in_child
from headway.tasks.base import StepInfo


@dataclass(frozen=True)
class Probe:
    """What the child process is given."""

    settings: dict[str, Any]
    """The fields of an EngineSpec that are sent to another process: all but `ranks` and
    `prepare`."""
    mesh: Mesh
    step: StepBatch
    """One microbatch with all rows of this rank, on the host, with every column that `prepare`
    adds."""
    sizes: tuple[int, ...]
    """Rows of a microbatch to choose from, smallest first."""
    limit_bytes: int
    tf32: bool = False
    deterministic: bool = False


def make_probe(spec: EngineSpec, step: StepBatch, sizes: Sequence[int], limit_bytes: int) -> Probe:
    """Describe a probe.

    `step` holds rows of this rank in microbatches of any size; they are repeated up to the largest
    size.
    """
    settings = {
        field.name: getattr(spec, field.name)
        for field in fields(spec)
        if field.name not in ("ranks", "prepare")
    }
    batch = stack_rows(step.microbatches, sizes[-1])
    if spec.prepare is not None:
        # Its columns have one entry per row; what they hold does not matter here, and all rows at
        # once may not fit.
        sample = spec.prepare(rows_of(batch, 0, 1).to(spec.device)).extra
        added = {
            name: value.cpu().repeat(sizes[-1], *[1] * (value.dim() - 1))
            for name, value in sample.items()
            if name not in batch.extra
        }
        batch = replace(batch, extra=batch.extra | added)
    flags = {
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return Probe(
        settings,
        spec.ranks.mesh,
        replace(step, microbatches=(batch,)),
        tuple(sizes),
        limit_bytes,
        **flags,
    )


def run_probe(probe: Probe, timeout_seconds: float) -> int:
    """The largest size that fits, found in a separate process. Raises ChildFailureError."""
    return run_in_child(measure, (probe,), timeout_seconds)


def measure(probe: Probe) -> int:
    """The largest size that fits; for a process that ends after this."""
    device: torch.device = probe.settings["device"]
    set_arithmetic(tf32=probe.tf32, deterministic=probe.deterministic)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, probe.limit_bytes / total), device)
    trials = Trials(EngineSpec(**probe.settings, ranks=fake_ranks(probe.mesh)), probe.step)
    return largest_fitting(probe.sizes, probe.limit_bytes, trials.peak_bytes)


def largest_fitting(
    sizes: Sequence[int], limit_bytes: int, peak_bytes: Callable[[int], int | None]
) -> int:
    """The largest size that fits, found with few trials.

    The two smallest sizes are cheap to measure. Memory grows in proportion to rows, so the largest
    size that a straight line through them allows is tried, and smaller ones until one fits.

    `peak_bytes(size)` is None if memory ran out. Where not even the smallest size fits, that is the
    answer: the first step of the run then explains what is missing.
    """
    low = peak_bytes(sizes[0])
    if low is None or len(sizes) == 1:
        return sizes[0]
    high = peak_bytes(sizes[1])
    if high is None:
        return sizes[0]
    slope = max(1.0, (high - low) / (sizes[1] - sizes[0]))
    chosen = max(
        (size for size in sizes if low + slope * (size - sizes[0]) <= limit_bytes), default=sizes[0]
    )
    while chosen > sizes[1] and peak_bytes(chosen) is None:
        chosen = max(size for size in sizes if size < chosen)
    return chosen


class Trials:
    """Run steps with a throw-away engine."""

    def __init__(self, spec: EngineSpec, step: StepBatch) -> None:
        self.spec = spec
        self.step = step
        self.engine: Engine | None = None

    def peak_bytes(self, rows: int) -> int | None:
        """Bytes at the peak of a step with microbatches of some rows; None if memory ran out."""
        try:
            gc.collect()
            begin_peak(self.spec.device)
            self._run(rows)
            return peak_bytes(self.spec.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler, whose traceback holds tensors. An engine that stopped halfway is
        # not used again.
        self.engine = None
        gc.collect()
        return None

    def _run(self, rows: int) -> None:
        engine = self.engine = self.engine or assemble(self.spec)
        batch = self.step.microbatches[0]
        # Two: the second adds to gradients that exist already, as in training.
        starts = range(0, batch.tokens.shape[0], rows)[:2]
        microbatches = tuple(rows_of(batch, start, start + rows) for start in starts)
        engine.forward_backward(replace(self.step, microbatches=microbatches), StepInfo(0, 1))
        # The step is skipped, but takes the memory of a real one.
        hyper = Hyper(0.0, (0.9, 0.95), 1e-8, 0.0)
        engine.update(
            dict.fromkeys((group.name for group in engine.groups), hyper),
            skip=torch.ones((), device=self.spec.device),
        )


def fake_ranks(mesh: Mesh) -> RankGroups:
    """The groups of a rank whose peers do not exist; for a process that joins no others."""
    if mesh.world == 1:
        return RankGroups()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=mesh.rank, world_size=mesh.world, store=FakeStore())
    return form_groups(mesh, RankGroup(mesh.rank, mesh.world, dist.group.WORLD))


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    """Some rows of a microbatch."""
    columns = {name: getattr(batch, name)[first:last] for name in TENSOR_FIELDS}
    return replace(
        batch, **columns, extra={name: value[first:last] for name, value in batch.extra.items()}
    )


def stack_rows(microbatches: Sequence[Batch], rows: int) -> Batch:
    """One microbatch of `rows` rows from several, which are repeated where they are too few."""
    available = sum(batch.tokens.shape[0] for batch in microbatches)
    times = -(-rows // available)

    def stacked(column: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        return torch.cat([column(batch) for batch in microbatches] * times)[:rows]

    columns = {
        name: stacked(lambda batch, name=name: getattr(batch, name)) for name in TENSOR_FIELDS
    }
    extra = {
        name: stacked(lambda batch, name=name: batch.extra[name]) for name in microbatches[0].extra
    }
    lengths = [batch.max_length for batch in microbatches]
    longest = None
    if None not in lengths:
        longest = max(length for length in lengths if length is not None)
    single = all(batch.single_document for batch in microbatches)
    return replace(
        microbatches[0], **columns, extra=extra, single_document=single, max_length=longest
    )


def begin_peak(device: torch.device) -> None:
    """Measure a device's memory from here on."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes that were allocated since `begin_peak`."""
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)

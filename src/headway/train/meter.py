"""Measures steps: host numbers and device tensors come in, one flat record per step goes out, late
and without stalling the device.

The device's numbers are copied to the host without waiting; a record is complete when its copy has
arrived, normally one or two steps later. Timings come from events on the device, so they measure
its work and not the queue in front of it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.data.batch import StepBatch
from headway.diagnose.slow_ranks import RankTimes
from headway.model.config import ModelConfig
from headway.model.flops import PictureFlops, TokenFlops, internlm_flops
from headway.parallel.engine import DeviceTimestamp, StepResult, Update
from headway.parallel.microbatch_runner import FULL_HEADS, STREAMING_HEADS
from headway.runtime.machine import gpu_load, peak_flops, resident_bytes
from headway.tasks.balance import LOAD, load_metrics, load_ratios
from headway.tasks.base import MetricSums
from headway.train.health import ANOMALIES

if TYPE_CHECKING:
    from headway.train.state import TrainState

AT_START = "valid_at_start"
"""Key in the first step's record: the validation before it."""
MAX_PENDING = 2
"""Steps whose numbers may be on their way. With more, the host is ahead of the device: it waits."""
FLOPS_PER_TFLOP = 1e12
LARGEST_EXPONENT = 700.0
"""exp() of more overflows a float."""
SCALARS = ("loss", "grad_norm", "skipped", "loss_scale", "verdict")
"""Metrics of every step, for any objective."""
WARM_STEPS = 5
"""The first steps wait for the first batches and are left out of averages."""


@dataclass(frozen=True)
class MeterSetup:
    """What does not change during a run."""

    model: ModelConfig
    flops: TokenFlops
    """Of one token, given which parameters train; every head sees all that its layer sees."""
    seq_len: int
    micro_rows: int
    device: torch.device
    device_name: str
    dtype: str
    total_steps: int
    source_names: tuple[str, ...]
    ranks_per_row: int = 1
    """Ranks that share the work on a row: context x tensor x pipeline."""
    picture_flops: PictureFlops | None = None
    """Of a picture in the model's vision tower; None: it has none."""


@dataclass(frozen=True)
class MetricLayout:
    """A metric in the flat tensor of a step: a sum and a weight, or several of each."""

    name: str
    num_sums: int | None = None
    """How many sums there are, one per source or per expert; None = a single number."""
    shape: tuple[int, ...] = ()


@dataclass
class Pending:
    """A step whose numbers are on their way to the host."""

    step: int
    host: dict[str, Any]
    """What the host knows at once: learning rate, tokens, documents, ..."""
    metrics: list[MetricLayout]
    values: Tensor
    """[n] on the host: SCALARS, then the sums and the weights of each metric."""
    begin: DeviceTimestamp
    between: DeviceTimestamp
    """After forward and backward, before the update."""
    end: DeviceTimestamp
    data_wait: float
    save_stall: float
    fresh: bool
    """Something other than training came before: time this step from its own beginning."""
    valid: dict[str, Any] = field(default_factory=dict)
    compute_marks: tuple[DeviceTimestamp, DeviceTimestamp] | None = None
    """A part of the step in which this rank waited for no other."""
    read_seconds: float = 0.0
    """How long this rank waited for its own data."""
    rollout_seconds: float | None = None
    """How long answers were sampled and judged for this step; None in runs without rollouts."""
    pictures: Tensor | None = None
    """[2] on the host: the sum of cells over this rank's pictures, and that of their squares."""


class Meter:
    """Turns steps into records, in order."""

    def __init__(self, setup: MeterSetup, consumed_tokens: int = 0, skipped: int = 0) -> None:
        self.setup = setup
        self.consumed_tokens = consumed_tokens
        self.skipped = skipped
        """Skipped steps of the whole run, earlier starts included."""
        self.fresh = True
        self.save_stall = 0.0
        """Seconds of saves since the last step."""
        self.stall_total = 0.0
        self.saves = 0
        self.waiting: deque[Pending] = deque()
        self.previous_end: DeviceTimestamp | None = None
        self.smoothed_seconds: float | None = None
        """Moving average of the time of a step."""
        self.smoothed_wait = 0.0
        """Moving average of the time that a step waits for its batch."""
        self.smoothed_rollout: float | None = None
        """Moving average of the time of a step's rollouts."""
        self.finished_steps = 0
        self.rank_times = RankTimes()
        self.sources = short_names(setup.source_names)
        self.peak = peak_flops(setup.device_name, setup.dtype)
        """FLOP/s of the device; None where they are not known."""
        self.internlm_flops = internlm_flops(setup.model, setup.seq_len)

    def interrupt(self) -> None:
        """Something other than training comes next; its time belongs to no step."""
        self.fresh = True

    def stalled(self, seconds: float) -> None:
        """A save stalled training for so long; the next step's record shows it."""
        self.save_stall += seconds
        self.saves += 1
        self.stall_total += seconds
        self.interrupt()

    def take_rank_times(self) -> RankTimes:
        """This rank's times since the last call, of the steps whose numbers have arrived."""
        taken = self.rank_times
        self.rank_times = RankTimes()
        return taken

    def restarted(self, state: TrainState, total_steps: int) -> Meter:
        """A new meter that counts from a restored state."""
        return Meter(
            replace(self.setup, total_steps=total_steps),
            state.consumed_tokens,
            state.engine.scalars()["skipped"],
        )

    def mark(self) -> DeviceTimestamp:
        """The time now, on the device."""
        return DeviceTimestamp.now(self.setup.device)

    def add(
        self,
        step: int,
        batch: StepBatch,
        host: dict[str, Any],
        result: StepResult,
        update: Update,
        marks: tuple[DeviceTimestamp, DeviceTimestamp, float],
        read_seconds: float = 0.0,
    ) -> Pending:
        """Begin the record of a step and the copy of its device numbers."""
        stats = batch.stats
        self.consumed_tokens += stats.tokens

        # One tensor, so that a step costs one copy. It is read once `end` has passed.
        metrics, tensors = _flatten(result, update)
        values = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)

        # Before `end` is marked, as the copy above.
        pictures = None
        if self.setup.picture_flops is not None:
            pictures = _picture_sizes(batch)

        counts = {
            "micro_num": len(batch.microbatches),
            "num_consumed_tokens": self.consumed_tokens,
            "num_samples_in_batch": stats.documents,
            "largest_length": stats.largest_length,
            "largest_batch": stats.largest_batch,
            "smallest_batch": stats.smallest_batch,
            "epoch": stats.epoch,
            "tokens": stats.tokens,
        }
        begin, between, data_wait = marks
        pending = Pending(
            step,
            {**host, **counts},
            metrics,
            values,
            begin,
            between,
            self.mark(),
            data_wait,
            self.save_stall,
            self.fresh,
        )
        pending.pictures = pictures
        pending.compute_marks = result.compute_window
        pending.read_seconds = read_seconds
        self.fresh = False
        self.save_stall = 0.0
        self.waiting.append(pending)
        return pending

    def collect(self, *, everything: bool = False) -> list[dict[str, Any]]:
        """The records that are complete; with `everything`, wait for the rest."""
        done: list[dict[str, Any]] = []
        while self.waiting:
            # The event follows the copy in the device's queue; on the CPU there is none.
            event = self.waiting[0].end.event
            if event is not None and not event.query():
                if not everything and len(self.waiting) <= MAX_PENDING:
                    break
                event.synchronize()
            done.append(self._make_record(self.waiting.popleft()))
        return done

    def _make_record(self, pending: Pending) -> dict[str, Any]:
        """The record of a step whose numbers have arrived."""
        # From end to end, so that the times of all steps add up to the time of the run.
        begin = pending.begin
        if not pending.fresh and self.previous_end is not None:
            begin = self.previous_end
        seconds = pending.end.since(begin)
        if pending.fresh and pending.rollout_seconds is not None:
            # Nothing before this step says where it began: at its rollout, which comes before the
            # first mark.
            seconds += pending.rollout_seconds
        self.previous_end = pending.end

        if self.smoothed_seconds is None:
            self.smoothed_seconds = seconds
        else:
            self.smoothed_seconds = _smoothed(self.smoothed_seconds, seconds)
        if pending.rollout_seconds is not None:
            average = self.smoothed_rollout
            if average is None:
                average = pending.rollout_seconds
            self.smoothed_rollout = _smoothed(average, pending.rollout_seconds)
        if self.finished_steps >= WARM_STEPS:
            self.smoothed_wait = _smoothed(self.smoothed_wait, pending.data_wait)
        self.finished_steps += 1

        # Compiling and the first batches would hide differences between ranks.
        if pending.compute_marks is not None and self.finished_steps > WARM_STEPS:
            first, last = pending.compute_marks
            self.rank_times = self.rank_times.plus(last.since(first), pending.read_seconds, seconds)

        record: dict[str, Any] = {
            "step": pending.step,
            **_unflatten(pending, self.sources),
            **pending.host,
            **pending.valid,
        }
        # Records have the total, under InternLM's name, and the anomaly by its name.
        self.skipped += record.pop("skipped")
        if verdict := int(record.pop("verdict")):
            record["anomaly"] = ANOMALIES[verdict]
        record["inf_nan_skip_batches"] = self.skipped
        record["time"] = self._timing(pending, seconds, self._flops(record))
        return record

    def _flops(self, record: dict[str, Any]) -> TokenFlops:
        """Of one token in this step: heads with gates do what the step's draws say."""
        full = record.get(FULL_HEADS)
        streaming = record.get(STREAMING_HEADS)
        if full is None or streaming is None:
            return self.setup.flops
        return self.setup.flops.with_heads(full, streaming)

    def _tower_flops(self, pending: Pending) -> float:
        """FLOPs of this rank's pictures in the vision tower."""
        if self.setup.picture_flops is None or pending.pictures is None:
            return 0.0
        cells, squares = pending.pictures.tolist()
        return self.setup.picture_flops.of(cells, squares)

    def _timing(self, pending: Pending, seconds: float, flops: TokenFlops) -> dict[str, Any]:
        """The `time` of a record. Rates are those of one rank, except `tokens_per_second`."""
        setup = self.setup
        # Tokens per second of this rank, padding included: the device computes it too.
        tokens = pending.host["micro_num"] * setup.micro_rows * setup.seq_len / setup.ranks_per_row
        rate = tokens / seconds

        mfu_full = None
        mfu_causal = None
        if self.peak is not None:
            tower = self._tower_flops(pending) / seconds
            mfu_full = (rate * flops.full + tower) / self.peak
            mfu_causal = (rate * flops.causal + tower) / self.peak

        data_wait_share = 0.0
        if self.smoothed_seconds:
            data_wait_share = self.smoothed_wait / self.smoothed_seconds

        rollout: dict[str, float] = {}
        if pending.rollout_seconds is not None and self.smoothed_rollout is not None:
            share = self.smoothed_rollout / (self.smoothed_seconds or seconds)
            rollout = {"rollout_seconds": pending.rollout_seconds, "rollout_share": share}
            update_seconds = seconds - pending.rollout_seconds
            if update_seconds > 0:
                rollout["update_tokens_per_second"] = pending.host["tokens"] / update_seconds

        utilisation = None
        power_watts = None
        if setup.device.type == "cuda":
            load = gpu_load(setup.device.index or 0)
            memory_bytes = torch.cuda.max_memory_allocated(setup.device)
            utilisation = load.utilisation
            power_watts = load.power_watts
        else:
            memory_bytes = resident_bytes()

        left_steps = setup.total_steps - pending.step
        return {
            "step_seconds": seconds,
            "tokens_per_second": pending.host["tokens"] / seconds,
            "tgs": rate,
            "tflops": rate * self.internlm_flops / FLOPS_PER_TFLOP,
            "mfu_full": mfu_full,
            "mfu_causal": mfu_causal,
            "fwd_bwd_time": pending.between.since(pending.begin),
            "data_wait_seconds": pending.data_wait,
            "save_stall_seconds": pending.save_stall,
            "data_wait_share": data_wait_share,
            **rollout,
            "memory_bytes": memory_bytes,
            "gpu_utilisation": utilisation,
            "gpu_power_watts": power_watts,
            "eta_seconds": (self.smoothed_seconds or seconds) * left_steps,
        }


def _smoothed(average: float, value: float) -> float:
    """An exponential moving average, over about ten steps."""
    return 0.9 * average + 0.1 * value


def short_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The last part of each path, or the whole path where two have the same last part."""
    last_parts = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
    names: list[str] = []
    for last_part, path in zip(last_parts, paths, strict=True):
        is_unique = last_parts.count(last_part) == 1
        names.append(last_part if is_unique else path)
    return tuple(names)


def means(sums: MetricSums) -> dict[str, Any]:
    """Metric sums of a validation as means; `nll` becomes `loss`, `perplexity` and `tokens`."""
    result: dict[str, Any] = {
        name: float(total) / max(float(weight), 1.0)
        for name, (total, weight) in sums.items()
        if total.dim() == 0
    }
    # The loads of experts are no scalars; they have ratios of their own.
    result |= load_metrics(sums)
    if "nll" in result:
        result["loss"] = result.pop("nll")
        result["perplexity"] = math.exp(min(result["loss"], LARGEST_EXPONENT))
        result["tokens"] = int(sums["nll"][1])
    return result


def _picture_sizes(batch: StepBatch) -> Tensor | None:
    """`Pending.pictures` of a step, on its way to the host."""
    # Imported here: a run of text alone loads no module of towers.
    from headway.model.vision import GRID

    grids = [micro.extra[GRID] for micro in batch.microbatches if GRID in micro.extra]
    if not grids:
        return None
    cells = torch.stack([grid.prod(-1).double() for grid in grids])
    sizes = torch.stack([cells.sum(), cells.square().sum()])
    if sizes.is_cuda:
        sizes = sizes.to("cpu", non_blocking=True)
    return sizes


def _flatten(result: StepResult, update: Update) -> tuple[list[MetricLayout], list[Tensor]]:
    """The numbers of a step as tensors, in the order that `_unflatten` reads, and what they are."""
    verdict = result.verdict
    if verdict is None:
        verdict = torch.zeros_like(result.loss)
    # In the order of SCALARS.
    tensors = [result.loss, update.norm, update.skipped, update.loss_scale, verdict]

    metrics: list[MetricLayout] = []
    for name, (total, weight) in result.metrics.items():
        num_sums = None
        if total.dim():
            num_sums = total.numel()
        metrics.append(MetricLayout(name, num_sums, tuple(total.shape)))
        tensors += [total, weight]
    return metrics, tensors


def _unflatten(pending: Pending, source_names: tuple[str, ...]) -> dict[str, Any]:
    """Means by name.

    `nll` keeps its name; `nll/source` becomes `loss/<name>` and `targets/<name>` of each source.
    """
    values = iter(pending.values.tolist())
    record: dict[str, Any] = {name: next(values) for name in SCALARS}
    record["skipped"] = int(record["skipped"])

    for metric in pending.metrics:
        size = 1
        if metric.num_sums is not None:
            size = metric.num_sums
        sums = list(islice(values, size))
        weights = list(islice(values, size))

        if metric.num_sums is None:
            record[metric.name] = _mean(sums[0], weights[0])
        elif metric.name == LOAD:
            # [mixtures, experts]: how many tokens each expert got.
            width = metric.shape[1]
            record |= load_ratios([sums[start : start + width] for start in range(0, size, width)])
        else:
            prefix = metric.name.removesuffix("/source").replace("nll", "loss")
            for source, total, weight in zip(source_names[:size], sums, weights, strict=True):
                record[f"targets/{source}"] = int(weight)
                record[f"{prefix}/{source}"] = _mean(total, weight)
    return record


def _mean(total: float, weight: float) -> float | None:
    """None where a step had nothing to measure, such as no token of a source."""
    if not weight:
        return None
    return total / weight

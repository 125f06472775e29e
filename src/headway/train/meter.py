"""Measures steps: host numbers and device tensors come in, one flat record per step goes out, late and without stalling the device.

The device's numbers are copied to the host without waiting; a record is complete when its copy has arrived, normally one or two steps
later. Timings come from events on the device, so they measure its work and not the queue in front of it.
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
from headway.model.flops import TokenFlops
from headway.parallel.engine import DeviceTimestamp, StepResult, Update
from headway.parallel.passes import FULL_HEADS, STREAMING_HEADS
from headway.runtime.machine import gpu_load, peak_flops, resident_bytes
from headway.tasks.balance import LOAD, load_metrics, load_ratios
from headway.tasks.base import MetricSums
from headway.train.health import ANOMALIES

if TYPE_CHECKING:
    from headway.train.state import TrainState

AT_START = "valid_at_start"
"""Key in the first step's record: the validation before it."""
MAX_PENDING = 2
SCALARS = ("loss", "grad_norm", "skipped", "loss_scale", "verdict")
"""Metrics of every step, for any objective."""
INTERNLM_MULTIPLE = 256
"""InternLM rounds the width of its feed-forward layers up to a multiple of this."""
WARM_STEPS = 5
"""The first steps wait for the first batches and are left out of averages."""


def internlm_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """InternLM's formula for its `tflops` field (no recompute): 3 [(8 + 4m) h^2 + 4 s h] L + 6 h V, m = 1.5 mlp_ratio.

    mlp_ratio is ffn / h; where the ffn is 8/3 h rounded up as InternLM rounds it, mlp_ratio is 8/3.
    """
    h = config.hidden_size
    nominal = -(-(h * 8 // 3) // INTERNLM_MULTIPLE) * INTERNLM_MULTIPLE
    m = 4.0 if config.mean_ffn == nominal else 1.5 * config.mean_ffn / h
    return 3 * ((8 + 4 * m) * h * h + 4 * seq_len * h) * config.num_layers + 6 * h * config.vocab


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
    """Ranks that work on the same rows (context x tensor x pipeline): what one rank does is this part of its rows."""


@dataclass(frozen=True)
class MetricLayout:
    """A metric in the flat tensor of a step: a sum and a weight, or one of each per source or expert."""

    name: str
    num_sources: int | None = None
    shape: tuple[int, ...] = ()


@dataclass
class Pending:
    """A step whose numbers are on their way to the host."""

    step: int
    host: dict[str, Any]
    metrics: list[MetricLayout]
    values: Tensor
    """SCALARS, then the sums and the weights of each metric."""
    begin: DeviceTimestamp
    between: DeviceTimestamp
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


class Meter:
    """Turns steps into records, in order."""

    def __init__(self, setup: MeterSetup, consumed_tokens: int = 0, skipped: int = 0) -> None:
        self.setup = setup
        self.consumed_tokens = consumed_tokens
        self.skipped = skipped
        self.fresh = True
        self.save_stall = self.stall_total = 0.0
        self.saves = 0
        self.waiting: deque[Pending] = deque()
        self.previous_end: DeviceTimestamp | None = None
        self.smoothed: float | None = None
        self.waited = 0.0
        self.seen = 0
        self.rank_times = RankTimes()
        self.sources = short_names(setup.source_names)
        self.peak = peak_flops(setup.device_name, setup.dtype)
        self.internlm = internlm_flops_per_token(setup.model, setup.seq_len)

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
        taken, self.rank_times = self.rank_times, RankTimes()
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
        self, step: int, batch: StepBatch, host: dict[str, Any], result: StepResult, update: Update,
        marks: tuple[DeviceTimestamp, DeviceTimestamp, float],        read_seconds: float = 0.0,
    ) -> Pending:  # fmt: skip
        """Begin the record of a step and the copy of its device numbers."""
        stats = batch.stats
        self.consumed_tokens += stats.tokens
        metrics, tensors = _flatten(result, update)
        values = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)
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
        pending.compute_marks, pending.read_seconds = result.compute_window, read_seconds
        self.fresh, self.save_stall = False, 0.0
        self.waiting.append(pending)
        return pending

    def collect(self, *, everything: bool = False) -> list[dict[str, Any]]:
        """The records that are complete; with `everything`, wait for the rest."""
        done: list[dict[str, Any]] = []
        while self.waiting:
            event = self.waiting[0].end.event
            if event is not None and not event.query():
                if not everything and len(self.waiting) <= MAX_PENDING:
                    break
                event.synchronize()
            done.append(self._finish(self.waiting.popleft()))
        return done

    def _finish(self, pending: Pending) -> dict[str, Any]:
        seconds = pending.end.since(
            pending.begin if pending.fresh or self.previous_end is None else self.previous_end
        )
        self.previous_end = pending.end
        self.smoothed = seconds if self.smoothed is None else 0.9 * self.smoothed + 0.1 * seconds
        self.waited = (
            0.9 * self.waited + 0.1 * pending.data_wait if self.seen >= WARM_STEPS else 0.0
        )
        self.seen += 1
        if pending.compute_marks is not None and self.seen > WARM_STEPS:
            begin, end = pending.compute_marks
            self.rank_times = self.rank_times.plus(end.since(begin), pending.read_seconds, seconds)
        record: dict[str, Any] = {
            "step": pending.step,
            **_divide(pending, self.sources),
            **pending.host,
            **pending.valid,
        }
        self.skipped += record.pop("skipped")
        if verdict := int(record.pop("verdict")):
            record["anomaly"] = ANOMALIES[verdict]
        record["inf_nan_skip_batches"] = self.skipped
        record["time"] = self._timing(pending, seconds, self._flops(record))
        return record

    def _flops(self, record: dict[str, Any]) -> TokenFlops:
        """Of one token in this step: heads with gates do what the step's draws say."""
        full, streaming = record.get(FULL_HEADS), record.get(STREAMING_HEADS)
        if full is None or streaming is None:
            return self.setup.flops
        return self.setup.flops.with_heads(full, streaming)

    def _timing(self, pending: Pending, seconds: float, flops: TokenFlops) -> dict[str, Any]:
        setup = self.setup
        rate = (
            pending.host["micro_num"]
            * setup.micro_rows
            * setup.seq_len
            / setup.ranks_per_row
            / seconds
        )
        load = gpu_load(setup.device.index or 0) if setup.device.type == "cuda" else None
        return {
            "step_seconds": seconds,
            "tokens_per_second": pending.host["tokens"] / seconds,
            "tgs": rate,
            "tflops": rate * self.internlm / 1e12,
            "mfu_full": None if self.peak is None else rate * flops.full / self.peak,
            "mfu_causal": None if self.peak is None else rate * flops.causal / self.peak,
            "fwd_bwd_time": pending.between.since(pending.begin),
            "data_wait_seconds": pending.data_wait,
            "save_stall_seconds": pending.save_stall,
            "data_wait_share": self.waited / self.smoothed if self.smoothed else 0.0,
            "memory_bytes": torch.cuda.max_memory_allocated(setup.device)
            if load is not None
            else resident_bytes(),
            "gpu_utilisation": None if load is None else load.utilisation,
            "gpu_power_watts": None if load is None else load.power_watts,
            "eta_seconds": (self.smoothed or seconds) * (setup.total_steps - pending.step),
        }


def short_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The last part of each path, or the whole path where two have the same last part."""
    last = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
    return tuple(
        short if last.count(short) == 1 else path for short, path in zip(last, paths, strict=True)
    )


def means(sums: MetricSums) -> dict[str, Any]:
    """Metric sums of a validation as means; `nll` becomes `loss`, `perplexity` and `tokens`."""
    result: dict[str, Any] = {
        name: float(total) / max(float(weight), 1.0)
        for name, (total, weight) in sums.items()
        if total.dim() == 0
    }
    result |= load_metrics(sums)
    if "nll" in result:
        result["loss"] = result.pop("nll")
        result["perplexity"] = math.exp(min(result["loss"], 700.0))
        result["tokens"] = int(sums["nll"][1])
    return result


def _flatten(result: StepResult, update: Update) -> tuple[list[MetricLayout], list[Tensor]]:
    verdict = torch.zeros_like(result.loss) if result.verdict is None else result.verdict
    tensors = [result.loss, update.norm, update.skipped, update.loss_scale, verdict]
    metrics: list[MetricLayout] = []
    for name, (total, weight) in result.metrics.items():
        metrics.append(
            MetricLayout(name, total.numel() if total.dim() else None, tuple(total.shape))
        )
        tensors += [total, weight]
    return metrics, tensors


def _divide(pending: Pending, source_names: tuple[str, ...]) -> dict[str, Any]:
    """Means by name: `nll` keeps its name, `nll/source` becomes `loss/<name>` and `targets/<name>` of each source."""
    values = iter(pending.values.tolist())
    record: dict[str, Any] = {name: next(values) for name in SCALARS}
    for metric in pending.metrics:
        size = 1 if metric.num_sources is None else metric.num_sources
        sums, weights = list(islice(values, size)), list(islice(values, size))
        if metric.num_sources is None:
            record[metric.name] = sums[0] / weights[0] if weights[0] else None
            continue
        if metric.name == LOAD:
            width = metric.shape[1]
            record |= load_ratios([sums[start : start + width] for start in range(0, size, width)])
            continue
        prefix = metric.name.removesuffix("/source").replace("nll", "loss")
        for source, total, weight in zip(source_names[:size], sums, weights, strict=True):
            record[f"targets/{source}"] = int(weight)
            record[f"{prefix}/{source}"] = total / weight if weight else None
    record["skipped"] = int(record["skipped"])
    return record

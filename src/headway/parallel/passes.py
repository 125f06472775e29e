"""Forward and backward over microbatches, the same for every engine: shares of one global loss come out, metrics as sums over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from headway.data.batch import Batch, StepBatch
from headway.model.base import Model, ModelOut
from headway.parallel.collectives import DifferentiableCollectives
from headway.parallel.context import part_of
from headway.parallel.engine import DeviceTimestamp, EngineSpec, StepResult
from headway.parallel.mesh import ring_ranks
from headway.runtime.seed import derive
from headway.tasks.balance import LOAD
from headway.tasks.base import (
    FirstPass,
    MetricSums,
    SeenRows,
    StepInfo,
    Task,
    first_passes_of,
)

FULL_HEADS = "full_heads"
STREAMING_HEADS = "streaming_heads"


class Passes:
    """Runs a model and an objective over microbatches."""

    def __init__(self, model: Model, objective: Task, spec: EngineSpec) -> None:
        self.model, self.objective, self.spec, self.ranks = model, objective, spec, spec.ranks
        self.exchange = DifferentiableCollectives(self.ranks.reduce)
        self.ring = ring_ranks(self.ranks.context.size, spec.model.kv_heads, self.ranks.tensor.size)
        model.chunk_tokens = spec.chunk_tokens
        self.waits_in_layers = (
            self.ranks.context.size * self.ranks.tensor.size * self.ranks.expert.size > 1
        )
        """Whether ranks exchange something inside each layer, so that all of them take as long as the slowest."""
        self.expert_load: Tensor | None = None
        """Tokens of each expert in the last step over all ranks, [mixtures, E], where the model has experts."""

    def backward(
        self, batch: StepBatch, at: StepInfo, scale: Tensor | None, before_last: Callable[[], None]
    ) -> StepResult:
        """Back-propagate every microbatch's share of the step's loss, times `scale`; the result is still this rank's part."""
        self.model.train()
        loss = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        sums: MetricSums = {}
        last = len(batch.microbatches) - 1
        totals = self._totals(batch)
        self.model.begin_step()
        microbatches, at = self._after_first_passes(batch.microbatches, at, batch.first_microbatch)
        window: list[DeviceTimestamp] = []
        for index, micro in enumerate(microbatches):
            number = batch.first_microbatch + index
            self._reseed(at, number)
            out = self._forward(micro, at, number)
            if index == 0:  # before this, parameters may have been waited for
                window.append(DeviceTimestamp.now(self.spec.device))
            outcome = self.objective.loss(
                out, micro, self._placed(at, index, last + 1), self.exchange
            )
            if self.waits_in_layers and index == 0:
                window.append(DeviceTimestamp.now(self.spec.device))
            share = outcome.share(totals)
            if index == last:
                before_last()
            (share if scale is None else share * scale).backward()
            loss += share.detach()
            add_metrics(sums, self._copy_shared(outcome.metrics))
            add_metrics(sums, head_shares(out))
        if not self.waits_in_layers:
            window.append(DeviceTimestamp.now(self.spec.device))
        return StepResult(loss, sums, compute_window=(window[0], window[1]))

    def _totals(self, batch: StepBatch) -> dict[str, float]:
        """What the terms of a step may be divided by."""
        return {
            **batch.totals,
            "tokens": float(batch.stats.tokens),
            "step": 1.0,
            "microbatches": float(len(batch.microbatches) * self.ranks.reduce.size),
        }

    def _copy_shared(self, metrics: MetricSums) -> MetricSums:
        """Metrics that do not share memory with a parameter of the objective: the update must not change what is logged of the loss."""
        if self.objective.module is None:
            return metrics
        owned = {
            parameter.untyped_storage().data_ptr()
            for parameter in self.objective.module.parameters()
        }

        def copied(tensor: Tensor) -> Tensor:
            return (
                tensor.detach().clone() if tensor.untyped_storage().data_ptr() in owned else tensor
            )

        return {name: (copied(total), copied(weight)) for name, (total, weight) in metrics.items()}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], at: StepInfo) -> MetricSums:
        """Metric sums over this rank's batches and all ranks, without gradients or dropout."""
        self.model.eval()
        self.model.begin_step()
        sums: MetricSums = {}
        moved, at = self._after_first_passes(batches, at, 0)
        count = len(moved) if isinstance(moved, list) else 0
        for index, micro in enumerate(moved):
            placed = self._placed(at, index, count)
            add_metrics(
                sums,
                self.objective.loss(
                    self.model.forward_batch(micro), micro, placed, self.exchange
                ).metrics,
            )
        return self.over_ranks(StepResult(torch.zeros((), device=self.spec.device), sums)).metrics

    def _reseed(self, at: StepInfo, microbatch: int) -> None:
        # torch.manual_seed notes a stack trace for every kind of device that this machine does not have: milliseconds each time
        seed = derive(self.spec.seed, "microbatch", at.step, microbatch)
        torch.default_generator.manual_seed(seed)
        if self.spec.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.spec.device.type == "mps":
            torch.mps.manual_seed(seed)

    def _moved(self, micro: Batch) -> Batch:
        """A microbatch on the device, with every column the objective needs; of its tokens, those that are this rank's."""
        moved = micro.to(self.spec.device)
        return part_of(
            moved if self.spec.prepare is None else self.spec.prepare(moved),
            self.ranks.context,
            self.ring,
        )

    @torch.no_grad()
    def _after_first_passes(
        self, batches: Iterable[Batch], at: StepInfo, first: int
    ) -> tuple[Iterable[Batch], StepInfo]:
        """Microbatches on the device, and the step with what its first passes read. Without first passes nothing is read ahead."""
        moved = map(self._moved, batches)
        passes = [
            one for one in first_passes_of(self.objective) if at.training or one.in_evaluation
        ]
        if not passes:
            return moved, at
        microbatches = list(moved)
        is_whole_step = len(microbatches) * self.ranks.reduce.size == 1
        seen: dict[str, SeenRows] = {}
        for one in passes:
            if is_whole_step and one.rows is None:
                continue
            values = self._read_rows(one, microbatches, at, first)
            if values is not None:
                seen[one.name] = SeenRows(self.exchange.gather(values))
        return microbatches, replace(at, seen=seen)

    def _read_rows(
        self, first_pass: FirstPass, microbatches: list[Batch], at: StepInfo, first: int
    ) -> Tensor | None:
        """What a first pass reads from this rank's microbatches; None on ranks without the model's output."""
        values: list[Tensor] = []
        for index, micro in enumerate(microbatches):
            self._reseed(at, first + index)
            rows = micro if first_pass.rows is None else first_pass.rows(micro)
            values.append(first_pass.read(self._forward(rows, at, first + index), rows))
        return torch.cat(values)

    def _placed(self, at: StepInfo, index: int, count: int) -> StepInfo:
        """The step as one of this rank's `count` microbatches sees it: it knows where its rows are among those of first passes."""
        if not at.seen:
            return at
        number = self.ranks.reduce.rank * count + index
        seen = {
            name: SeenRows(values, number * (len(values) // (count * self.ranks.reduce.size)))
            for name, (values, _) in at.seen.items()
        }
        return replace(at, seen=seen)

    def _forward(self, batch: Batch, at: StepInfo, microbatch: int) -> ModelOut:
        """One pass. What the model samples itself is the same on all ranks that share a microbatch; in evaluation it samples nothing."""
        seed = derive(self.spec.seed, "gates", at.step, microbatch) if at.training else None
        return self.model.forward_batch(batch, seed)

    @torch.no_grad()
    def over_ranks(self, result: StepResult) -> StepResult:
        """Add loss and metric sums over all ranks, in one exchange."""
        result = self._summed(result)
        self.expert_load = result.metrics[LOAD][0] if LOAD in result.metrics else None
        return result

    def _summed(self, result: StepResult) -> StepResult:
        if self.ranks.reduce.size == 1:
            return result
        tensors = [result.loss] + [part for pair in result.metrics.values() for part in pair]
        flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        self.ranks.reduce.all_reduce(flat).wait()
        parts = [
            part.view(tensor.shape).to(tensor.dtype)
            for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)
        ]
        metrics = {
            name: (parts[1 + 2 * i], parts[2 + 2 * i]) for i, name in enumerate(result.metrics)
        }
        return replace(result, loss=parts[0], metrics=metrics)


def head_shares(out: ModelOut) -> MetricSums:
    """Of the KV heads of a model with gates: which share ran full attention in a pass, and which streamed; an undecided head does both."""
    if out.gates is None:
        return {}
    z = out.gates.z.detach()
    one = z.new_ones(())
    return {
        FULL_HEADS: ((z > 0).float().mean(), one),
        STREAMING_HEADS: ((z < 1).float().mean(), one),
    }


def add_metrics(sums: MetricSums, more: MetricSums) -> None:
    """Add metric sums to others."""
    for name, (total, weight) in more.items():
        before = sums.get(name)
        sums[name] = (
            (total.detach(), weight.detach())
            if before is None
            else (before[0] + total.detach(), before[1] + weight.detach())
        )

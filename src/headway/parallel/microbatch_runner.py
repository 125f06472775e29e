"""Forward and backward over microbatches, the same for every engine.

Microbatches of a step come in; gradients of shares of one global loss are left in the model, and
loss and metrics come out as sums over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.data.batch import KEPT, Batch, StepBatch
from headway.model.base import Model, ModelOut
from headway.parallel.collectives import DifferentiableCollectives
from headway.parallel.context import part_of
from headway.parallel.engine import DeviceTimestamp, EngineSpec, StepResult
from headway.parallel.mesh import ring_ranks
from headway.runtime.seed import derive
from headway.tasks.balance import LOAD
from headway.tasks.base import (
    LARGEST,
    FirstPass,
    MetricSums,
    SeenRows,
    StepInfo,
    Task,
    first_passes_of,
)

if TYPE_CHECKING:
    from headway.kernels.policy_scores import DrawnFrom

FULL_HEADS = "full_heads"
STREAMING_HEADS = "streaming_heads"


class MicrobatchRunner:
    """Runs a model and an objective over microbatches."""

    def __init__(self, model: Model, objective: Task, spec: EngineSpec) -> None:
        self.model = model
        self.objective = objective
        self.spec = spec
        self.ranks = spec.ranks
        self.exchange = DifferentiableCollectives(self.ranks.reduce)
        self.ring = ring_ranks(self.ranks.context.size, spec.model.kv_heads, self.ranks.tensor.size)
        model.chunk_tokens = spec.chunk_tokens

        self.waits_in_layers = (
            self.ranks.context.size * self.ranks.tensor.size * self.ranks.expert.size > 1
        )
        """Whether ranks exchange something inside each layer, so that all of them take as long as
        the slowest."""
        self.expert_load: Tensor | None = None
        """Tokens of each expert in the last step over all ranks, [mixtures, E], where the model has
        experts."""
        self.last_step: StepInfo | None = None
        """The step of the last backward."""

    def backward(
        self,
        batch: StepBatch,
        step_info: StepInfo,
        scale: Tensor | None,
        before_last: Callable[[], None],
    ) -> StepResult:
        """Back-propagate every microbatch's share of the step's loss, times `scale`.

        `before_last` is called before the last backward, under which gradients are exchanged.
        The result is still this rank's part: `over_ranks` adds the parts up.
        """
        self.model.train()
        self.model.begin_step()
        self.last_step = step_info
        first = batch.first_microbatch
        count = len(batch.microbatches)
        totals = self._totals(batch)
        microbatches, step_info = self._run_first_passes(batch.microbatches, step_info, first)

        loss = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        sums: MetricSums = {}
        window: list[DeviceTimestamp] = []
        for index, micro in enumerate(microbatches):
            # The noise of a microbatch depends on its number in the run's step, not on the rank or
            # on what was drawn before it.
            self._reseed(step_info, first + index)
            out = self._forward(micro, step_info, first + index)

            # The first forward may have waited for parameters of other ranks. Where layers wait for
            # other ranks, too, the window is that of the first loss.
            if index == 0:
                window.append(DeviceTimestamp.now(self.spec.device))
            outcome = self.objective.loss(
                out, micro, self._for_microbatch(step_info, index, count), self.exchange
            )
            if self.waits_in_layers and index == 0:
                window.append(DeviceTimestamp.now(self.spec.device))

            share = outcome.share(totals)
            if index == count - 1:
                before_last()
            scaled = share
            if scale is not None:
                scaled = share * scale
            scaled.backward()

            loss += share.detach()
            add_metrics(sums, self._copy_shared(outcome.metrics))
            add_metrics(sums, head_shares(out))
        if not self.waits_in_layers:
            window.append(DeviceTimestamp.now(self.spec.device))
        return StepResult(loss, sums, compute_window=(window[0], window[1]))

    def _totals(self, batch: StepBatch) -> dict[str, float]:
        """Weights of the whole step over all ranks: what the terms of a loss may be divided by."""
        return {
            **batch.totals,
            "tokens": float(batch.stats.tokens),
            "step": 1.0,
            "microbatches": float(len(batch.microbatches) * self.ranks.reduce.size),
        }

    def _copy_shared(self, metrics: MetricSums) -> MetricSums:
        """Copy metrics that are views of the objective's parameters.

        They are read after the update, which must not change what is logged of this step.
        """
        if self.objective.module is None:
            return metrics
        storages = {
            parameter.untyped_storage().data_ptr()
            for parameter in self.objective.module.parameters()
        }

        def copied(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() in storages:
                return tensor.detach().clone()
            return tensor

        return {name: (copied(total), copied(weight)) for name, (total, weight) in metrics.items()}

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], step_info: StepInfo) -> MetricSums:
        """Metric sums over this rank's batches and all ranks, without gradients or dropout."""
        self.model.eval()
        self.model.begin_step()
        sums: MetricSums = {}
        microbatches, step_info = self._run_first_passes(batches, step_info, 0)

        # Only first passes need the count, and they have read all batches into a list.
        count = 0
        if isinstance(microbatches, list):
            count = len(microbatches)

        def add(index: int, micro: Batch, out: ModelOut) -> None:
            info = self._for_microbatch(step_info, index, count)
            outcome = self.objective.loss(out, micro, info, self.exchange)
            add_metrics(sums, outcome.metrics)

        self._forward_each(microbatches, step_info, add)
        no_loss = torch.zeros((), device=self.spec.device)
        return self._sum_evaluation(StepResult(no_loss, sums)).metrics

    @torch.no_grad()
    def token_log_probs(
        self, batches: Iterable[Batch], step_info: StepInfo, drawn: DrawnFrom
    ) -> list[Tensor]:
        """The log-probability of every target of this rank's microbatches, [B,T] each."""
        self.model.eval()
        self.model.begin_step()
        microbatches = [self._to_device(batch) for batch in batches]
        log_probs: list[Tensor] = []

        def read(index: int, micro: Batch, out: ModelOut) -> None:
            scores = out.head.policy(micro.targets, drawn, micro.extra.get(KEPT))
            log_probs.append(scores.log_prob)

        self._forward_each(microbatches, step_info, read)
        return self._on_all_stages(log_probs, microbatches)

    def _on_all_stages(self, values: list[Tensor], microbatches: list[Batch]) -> list[Tensor]:
        """What the stage that has the model's output read, on all stages of a pipeline."""
        return values

    def _forward_each(
        self,
        microbatches: Iterable[Batch],
        step_info: StepInfo,
        add: Callable[[int, Batch, ModelOut], None],
    ) -> None:
        """Run the model over microbatches without gradients; `add` gets each with its number."""
        for index, micro in enumerate(microbatches):
            add(index, micro, self.model.forward_batch(micro))

    def _sum_evaluation(self, result: StepResult) -> StepResult:
        """Metric sums of a validation over all ranks."""
        return self.over_ranks(result)

    def _reseed(self, step_info: StepInfo, microbatch: int) -> None:
        # Not torch.manual_seed: for every kind of device that this machine lacks it records a stack
        # trace, which takes milliseconds.
        seed = derive(self.spec.seed, "microbatch", step_info.step, microbatch)
        torch.default_generator.manual_seed(seed)
        if self.spec.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.spec.device.type == "mps":
            torch.mps.manual_seed(seed)

    def _to_device(self, micro: Batch) -> Batch:
        """Move a microbatch to the device, add the objective's columns, keep this rank's tokens."""
        moved = micro.to(self.spec.device)
        # Before tokens are split: a reference model sees whole rows.
        if self.spec.prepare is not None:
            moved = self.spec.prepare(moved)
        return part_of(moved, self.ranks.context, self.ring)

    @torch.no_grad()
    def _run_first_passes(
        self, batches: Iterable[Batch], step_info: StepInfo, first: int
    ) -> tuple[Iterable[Batch], StepInfo]:
        """Microbatches on the device, and the step with what its first passes read.

        Without first passes the microbatches are an iterator: each is moved when it is needed.
        """
        moved = map(self._to_device, batches)
        passes = [
            first_pass
            for first_pass in first_passes_of(self.objective)
            if step_info.training or first_pass.in_evaluation
        ]
        if not passes:
            return moved, step_info

        microbatches = list(moved)
        is_whole_step = len(microbatches) * self.ranks.reduce.size == 1
        seen: dict[str, SeenRows] = {}
        for first_pass in passes:
            # The loss of the only microbatch sees all rows of the step itself.
            if is_whole_step and first_pass.rows is None:
                continue
            values = self._read_rows(first_pass, microbatches, step_info, first)
            if values is not None:
                seen[first_pass.name] = SeenRows(self.exchange.gather(values))
        return microbatches, replace(step_info, seen=seen)

    def _read_rows(
        self, first_pass: FirstPass, microbatches: list[Batch], step_info: StepInfo, first: int
    ) -> Tensor | None:
        """What a first pass reads from this rank's microbatches.

        None on ranks without the model's output (stages of a pipeline but the last).
        """
        values: list[Tensor] = []
        for index, micro in enumerate(microbatches):
            # As in `backward`: the pass must draw the dropout masks and gates that the loss will
            # see.
            self._reseed(step_info, first + index)
            rows = micro
            if first_pass.rows is not None:
                rows = first_pass.rows(micro)
            out = self._forward(rows, step_info, first + index)
            values.append(first_pass.read(out, rows))
        return torch.cat(values)

    def _for_microbatch(self, step_info: StepInfo, index: int, count: int) -> StepInfo:
        """The step for one of this rank's `count` microbatches: where its rows begin among all.

        First passes gathered their values rank by rank, each rank's microbatches in order, with
        equally many values from every microbatch.
        """
        if not step_info.seen:
            return step_info
        position = self.ranks.reduce.rank * count + index
        seen: dict[str, SeenRows] = {}
        for name, (values, _) in step_info.seen.items():
            per_microbatch = len(values) // (count * self.ranks.reduce.size)
            seen[name] = SeenRows(values, position * per_microbatch)
        return replace(step_info, seen=seen)

    def _forward(self, batch: Batch, step_info: StepInfo, microbatch: int) -> ModelOut:
        """One pass.

        What the model samples itself is the same on all ranks that share a microbatch; in
        evaluation it samples nothing.
        """
        seed = None
        if step_info.training:
            seed = derive(self.spec.seed, "gates", step_info.step, microbatch)
        return self.model.forward_batch(batch, seed)

    @torch.no_grad()
    def over_ranks(self, result: StepResult) -> StepResult:
        """Add loss and metric sums over all ranks, in one exchange."""
        result = self._sum_result(result)
        self.expert_load = None
        if LOAD in result.metrics:
            self.expert_load = result.metrics[LOAD][0]
        return result

    def _sum_result(self, result: StepResult) -> StepResult:
        if self.ranks.reduce.size == 1:
            return result
        tensors = [result.loss]
        for pair in result.metrics.values():
            tensors += pair

        # fp64: counts of tokens stay exact, and the order in which ranks are added hardly shows.
        flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        self.ranks.reduce.all_reduce(flat).wait()
        sizes = [tensor.numel() for tensor in tensors]
        totals = [
            total.view(tensor.shape).to(tensor.dtype)
            for total, tensor in zip(flat.split(sizes), tensors, strict=True)
        ]

        # The loss comes first, then (sum, weight) of each metric.
        pairs = zip(totals[1::2], totals[2::2], strict=True)
        metrics = dict(zip(result.metrics, pairs, strict=True))
        return replace(result, loss=totals[0], metrics=metrics | self._largest(result.metrics))

    def _largest(self, metrics: MetricSums) -> MetricSums:
        """Metrics of which the largest value over all ranks counts."""
        names = [name for name in metrics if name.endswith(LARGEST)]
        if not names:
            return {}
        here = torch.stack([metrics[name][0].float() for name in names])
        everywhere = here.new_empty(self.ranks.reduce.size * len(names))
        self.ranks.reduce.all_gather(everywhere, here).wait()
        largest = everywhere.view(-1, len(names)).amax(0)
        return {name: (largest[i], metrics[name][1]) for i, name in enumerate(names)}


def head_shares(out: ModelOut) -> MetricSums:
    """The shares of KV heads that ran full attention and that streamed, in a model with gates.

    An undecided head does both.
    """
    if out.gates is None:
        return {}
    z = out.gates.z.detach()
    weight = z.new_ones(())
    return {
        FULL_HEADS: ((z > 0).float().mean(), weight),
        STREAMING_HEADS: ((z < 1).float().mean(), weight),
    }


def add_metrics(sums: MetricSums, more: MetricSums) -> None:
    """Add metric sums to others; of some metrics the larger value stays."""
    for name, (total, weight) in more.items():
        before = sums.get(name)
        if before is None:
            sums[name] = (total.detach(), weight.detach())
        elif name.endswith(LARGEST):
            sums[name] = (before[0].maximum(total.detach()), before[1])
        else:
            sums[name] = (before[0] + total.detach(), before[1] + weight.detach())

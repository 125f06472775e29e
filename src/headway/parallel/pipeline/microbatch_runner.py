"""Forward and backward over microbatches through the stages of a pipeline.

The contract is that of `MicrobatchRunner`, which does the same in one process.

The last stage has the loss and the metrics; after the step every rank has them. Their names are
agreed on in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from headway.data.batch import Batch, StepBatch
from headway.errors import ParallelError
from headway.model.base import Model, ModelOut
from headway.parallel.engine import EngineSpec, StepResult
from headway.parallel.microbatch_runner import MicrobatchRunner, add_metrics, head_shares
from headway.parallel.pipeline.links import Links
from headway.parallel.pipeline.program import forward_programs, training_programs
from headway.parallel.pipeline.runner import ExecutedAction, StageContext, StageHooks, StageRun
from headway.parallel.pipeline.stages import PipelinePart
from headway.parallel.pipeline.weight_grads import WeightGradQueue
from headway.runtime.seed import derive
from headway.tasks.base import FirstPass, MetricSums, StepInfo, Task

PASSES_PER_RANK = 4
"""Microbatches of an evaluation that are in the pipeline together, for every rank of it."""
MetricLayout = list[tuple[str, tuple[int, ...], str, tuple[int, ...], str]]
"""Name, and shape and dtype of sum and weight."""


class PipelineRunner(MicrobatchRunner):
    """Runs the stages of one rank."""

    def __init__(self, model: Model, objective: Task, spec: EngineSpec, part: PipelinePart) -> None:
        super().__init__(model, objective, spec)
        self.part = part
        self.links = Links(spec.ranks.pipeline)
        queue = None
        if part.shape.schedule == "zero_bubble":
            queue = WeightGradQueue()
            queue.divide(model)
        self.context = StageContext(
            model, part, self.links, spec.device, spec.dtype, self._stream_shape, queue
        )
        self.end_last: Callable[[], None] = lambda: None
        """Called after the backward of a stage's last microbatch."""
        self.trace: list[ExecutedAction] | None = None
        """What ran in the last step, with times; recorded where it is not None."""
        self._layout: MetricLayout | None = None
        """The metrics of a training step, as agreed on in the first one."""

    def _stream_shape(self, batch: Batch) -> tuple[int, ...]:
        """[B,t,D] of the hidden states between two stages.

        With parallel.sequence, a tensor rank sends the tokens whose stream it has.
        """
        rows, tokens = batch.tokens.shape
        if self.spec.parallel.sequence:
            tokens //= self.ranks.tensor.size
        return rows, tokens, self.model.config.hidden_size

    def backward(
        self,
        batch: StepBatch,
        step_info: StepInfo,
        scale: Tensor | None,
        before_last: Callable[[], None],
    ) -> StepResult:
        """As `MicrobatchRunner.backward`, in the order of the schedule.

        Loss and metrics are zero and empty on ranks without the last stage.
        """
        self.model.train()
        self.model.begin_step()
        self.last_step = step_info
        first = batch.first_microbatch
        totals = self._totals(batch)
        moved, step_info = self._run_first_passes(batch.microbatches, step_info, first)
        # Every stage reads tokens and masks of every microbatch; only hidden states travel.
        microbatches = list(moved)

        loss = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        sums: MetricSums = {}

        def finish(number: int, out: ModelOut) -> Tensor:
            info = self._for_microbatch(step_info, number, len(microbatches))
            outcome = self.objective.loss(out, microbatches[number], info, self.exchange)
            share = outcome.share(totals)
            loss.add_(share.detach())
            add_metrics(sums, self._copy_shared(outcome.metrics))
            add_metrics(sums, head_shares(out))
            if scale is None:
                return share
            return share * scale

        hooks = replace(
            self._hooks(step_info, first, finish), begin_last=before_last, end_last=self.end_last
        )
        run = StageRun(self.context, hooks, microbatches, trains=True)
        run.run(training_programs(self.part.shape, len(microbatches))[self.part.rank])
        if self.trace is not None:
            self.trace = run.executed
        # No window to compare ranks by: stages differ by design.
        return StepResult(loss, sums)

    def _hooks(
        self, step_info: StepInfo, first: int, finish: Callable[[int, ModelOut], Tensor | None]
    ) -> StageHooks:
        """What a pass calls; `first` is the number of its first microbatch in the step."""

        def gate_seed(number: int) -> int | None:
            if step_info.training:
                return derive(self.spec.seed, "gates", step_info.step, first + number)
            return None

        is_random = self.model.training and self.model.is_random
        return StageHooks(
            gate_seed, lambda number: self._reseed(step_info, first + number), finish, is_random
        )

    @torch.no_grad()
    def _forward_all(self, microbatches: list[Batch], hooks: StageHooks) -> None:
        run = StageRun(self.context, hooks, microbatches, trains=False)
        run.run(forward_programs(self.part.shape, len(microbatches))[self.part.rank])

    def _read_rows(
        self, first_pass: FirstPass, microbatches: list[Batch], step_info: StepInfo, first: int
    ) -> Tensor | None:
        """As in one process; the last stage alone has the model's output."""
        rows = microbatches
        if first_pass.rows is not None:
            rows = [first_pass.rows(micro) for micro in microbatches]
        values: list[Tensor] = []

        def read(number: int, out: ModelOut) -> None:
            values.append(first_pass.read(out, rows[number]))

        self._forward_all(rows, self._hooks(step_info, first, read))
        if values:
            return torch.cat(values)
        return None

    def _forward_each(
        self,
        microbatches: Iterable[Batch],
        step_info: StepInfo,
        add: Callable[[int, Batch, ModelOut], None],
    ) -> None:
        """As in one process; the last stage alone has the model's output.

        A few at a time: without first passes batches are an iterator that may be long.
        """
        done = 0
        for chunk in _chunks(microbatches, PASSES_PER_RANK * self.part.shape.pipeline):

            def finish(
                number: int, out: ModelOut, chunk: list[Batch] = chunk, done: int = done
            ) -> None:
                add(done + number, chunk[number], out)

            self._forward_all(chunk, self._hooks(step_info, 0, finish))
            done += len(chunk)

    def _on_all_stages(self, values: list[Tensor], microbatches: list[Batch]) -> list[Tensor]:
        """The last stage sends its values to the others."""
        if not values:
            values = [torch.zeros_like(micro.loss_weight) for micro in microbatches]
        for value in values:
            self.ranks.pipeline.broadcast(value, self.ranks.pipeline.size - 1).wait()
        return values

    def _sum_evaluation(self, result: StepResult) -> StepResult:
        """The metrics of training may differ from these: they must not be compared."""
        training_layout = self._layout
        self._layout = None
        summed = self.over_ranks(result)
        self._layout = training_layout
        return summed

    @torch.no_grad()
    def over_ranks(self, result: StepResult) -> StepResult:
        """Add loss and metric sums over the ranks of the last stage, and send them to all."""
        pipeline = self.ranks.pipeline
        last = self.part.shape.pipeline - 1
        if self.part.is_last:
            result = super().over_ranks(result)

        # Ranks without the loss learn in the first step what they will receive.
        local_layout = layout_of(result.metrics)
        layout = self._layout
        if layout is None:
            layout = self._layout = pipeline.gather(local_layout)[last]
        if self.part.is_last and local_layout != layout:
            before = [name for name, *_ in layout]
            now = [name for name, *_ in local_layout]
            raise ParallelError(
                f"the objective's metrics were {before} and are now {now}; a pipeline needs "
                "the same in every step."
            )

        # One message: the loss, then (sum, weight) of each metric.
        shapes: list[tuple[tuple[int, ...], str]] = [((), "float32")]
        for _, sum_shape, sum_dtype, weight_shape, weight_dtype in layout:
            shapes += [(sum_shape, sum_dtype), (weight_shape, weight_dtype)]
        sizes = [torch.Size(shape).numel() for shape, _ in shapes]
        if self.part.is_last:
            tensors = [result.loss]
            for pair in result.metrics.values():
                tensors += pair
            flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.float64, device=self.spec.device)
        pipeline.broadcast(flat, last).wait()

        totals = [
            total.view(shape).to(getattr(torch, dtype))
            for total, (shape, dtype) in zip(flat.split(sizes), shapes, strict=True)
        ]
        names = [name for name, *_ in layout]
        pairs = zip(totals[1::2], totals[2::2], strict=True)
        return replace(result, loss=totals[0], metrics=dict(zip(names, pairs, strict=True)))


def layout_of(metrics: MetricSums) -> MetricLayout:
    """What another rank must know to receive metrics."""
    return [
        (name, tuple(total.shape), _dtype(total), tuple(weight.shape), _dtype(weight))
        for name, (total, weight) in metrics.items()
    ]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _chunks(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    source: Any = iter(batches)
    while chunk := list(islice(source, size)):
        yield chunk

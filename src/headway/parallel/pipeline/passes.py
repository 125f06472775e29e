"""Forward and backward over microbatches through the stages of a pipeline: what `Passes` does in one process, by the same contract.

The last stage has the loss and the metrics; after the step every rank has them. Their names are agreed on in the first step.
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
from headway.parallel.passes import Passes, add_metrics, head_shares
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


class PipelinePasses(Passes):
    """Runs the stages of one rank."""

    def __init__(self, model: Model, objective: Task, spec: EngineSpec, part: PipelinePart) -> None:
        super().__init__(model, objective, spec)
        self.part, self.links = part, Links(spec.ranks.pipeline)
        queue = WeightGradQueue() if part.shape.schedule == "zero_bubble" else None
        if queue is not None:
            queue.divide(model)
        self.context = StageContext(
            model, part, self.links, spec.device, spec.dtype, self._stream_shape, queue
        )
        self.end_last: Callable[[], None] = lambda: None
        """Called after the backward of a stage's last microbatch."""
        self.trace: list[ExecutedAction] | None = None
        """What ran in the last step, where somebody wants to know."""
        self._layout: MetricLayout | None = None

    def _stream_shape(self, batch: Batch) -> tuple[int, ...]:
        """Where norms and stream hold some of the tokens of a tensor rank, so does what it sends."""
        rows, tokens = batch.tokens.shape
        return (
            rows,
            tokens // (self.ranks.tensor.size if self.spec.parallel.sequence else 1),
            self.model.config.hidden_size,
        )

    def backward(
        self, batch: StepBatch, at: StepInfo, scale: Tensor | None, before_last: Callable[[], None]
    ) -> StepResult:
        """As `Passes.backward`, in the order of the schedule; loss and metrics are zero and empty on ranks without the last stage."""
        self.model.train()
        loss = torch.zeros((), dtype=torch.float32, device=self.spec.device)
        sums: MetricSums = {}
        totals = self._totals(batch)
        self.model.begin_step()
        first = batch.first_microbatch
        moved, at = self._after_first_passes(batch.microbatches, at, first)
        microbatches = list(moved)

        def finish(number: int, out: ModelOut) -> Tensor:
            placed = self._placed(at, number, len(microbatches))
            outcome = self.objective.loss(out, microbatches[number], placed, self.exchange)
            share = outcome.share(totals)
            loss.add_(share.detach())
            add_metrics(sums, self._copy_shared(outcome.metrics))
            add_metrics(sums, head_shares(out))
            return share if scale is None else share * scale

        hooks = replace(
            self._hooks(at, first, finish), begin_last=before_last, end_last=self.end_last
        )
        run = StageRun(self.context, hooks, microbatches, trains=True)
        run.run(training_programs(self.part.shape, len(microbatches))[self.part.rank])
        if self.trace is not None:
            self.trace = run.executed
        return StepResult(loss, sums)  # no window to compare ranks by: stages differ by design

    def _hooks(
        self, at: StepInfo, first: int, finish: Callable[[int, ModelOut], Tensor | None]
    ) -> StageHooks:
        def gate_seed(number: int) -> int | None:
            return derive(self.spec.seed, "gates", at.step, first + number) if at.training else None

        is_random = self.model.training and self.model.is_random
        return StageHooks(
            gate_seed, lambda number: self._reseed(at, first + number), finish, is_random
        )

    @torch.no_grad()
    def _forward_all(self, microbatches: list[Batch], hooks: StageHooks) -> None:
        run = StageRun(self.context, hooks, microbatches, trains=False)
        run.run(forward_programs(self.part.shape, len(microbatches))[self.part.rank])

    def _read_rows(
        self, first_pass: FirstPass, microbatches: list[Batch], at: StepInfo, first: int
    ) -> Tensor | None:
        """As in one process; the last stage alone has the model's output."""
        rows = microbatches
        if first_pass.rows is not None:
            rows = [first_pass.rows(micro) for micro in microbatches]
        values: list[Tensor] = []

        def read(number: int, out: ModelOut) -> None:
            values.append(first_pass.read(out, rows[number]))

        self._forward_all(rows, self._hooks(at, first, read))
        return torch.cat(values) if values else None

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], at: StepInfo) -> MetricSums:
        """Metric sums over this rank's batches and all ranks, without gradients or dropout."""
        self.model.eval()
        self.model.begin_step()
        sums: MetricSums = {}
        moved, at = self._after_first_passes(batches, at, 0)
        count = len(moved) if isinstance(moved, list) else 0
        done = 0
        for some in _chunks(moved, PASSES_PER_RANK * self.part.shape.pipeline):

            def finish(
                number: int, out: ModelOut, some: list[Batch] = some, done: int = done
            ) -> None:
                placed = self._placed(at, done + number, count)
                outcome = self.objective.loss(out, some[number], placed, self.exchange)
                add_metrics(sums, outcome.metrics)

            self._forward_all(some, self._hooks(at, 0, finish))
            done += len(some)
        self._layout, before = None, self._layout  # those of training may differ
        found = self.over_ranks(StepResult(torch.zeros((), device=self.spec.device), sums)).metrics
        self._layout = before
        return found

    @torch.no_grad()
    def over_ranks(self, result: StepResult) -> StepResult:
        """Add loss and metric sums over the ranks of the last stage, and give them to those of the others."""
        pipeline, last = self.ranks.pipeline, self.part.shape.pipeline - 1
        if self.part.is_last:
            result = super().over_ranks(result)
        found = layout_of(result.metrics)
        layout = self._layout
        if layout is None:
            layout = self._layout = pipeline.gather(found)[last]
        if self.part.is_last and found != layout:
            names = [[name for name, *_ in one] for one in (layout, found)]
            raise ParallelError(
                f"the objective's metrics were {names[0]} and are now {names[1]}; a pipeline needs the same in every step."
            )
        shapes = [((), "float32"), *(pair for _, s, t, w, u in layout for pair in ((s, t), (w, u)))]
        sizes = [torch.Size(shape).numel() for shape, _ in shapes]
        if self.part.is_last:
            tensors = [result.loss] + [part for pair in result.metrics.values() for part in pair]
            flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        else:
            flat = torch.empty(sum(sizes), dtype=torch.float64, device=self.spec.device)
        pipeline.broadcast(flat, last).wait()
        parts = [
            part.view(shape).to(getattr(torch, dtype))
            for part, (shape, dtype) in zip(flat.split(sizes), shapes, strict=True)
        ]
        metrics = {
            name: (parts[1 + 2 * i], parts[2 + 2 * i]) for i, (name, *_) in enumerate(layout)
        }
        return replace(result, loss=parts[0], metrics=metrics)


def layout_of(metrics: MetricSums) -> MetricLayout:
    """What another rank must know to receive metrics."""
    return [
        (name, tuple(a.shape), _dtype(a), tuple(b.shape), _dtype(b))
        for name, (a, b) in metrics.items()
    ]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _chunks(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    source: Any = iter(batches)
    while some := list(islice(source, size)):
        yield some

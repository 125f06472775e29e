"""The flat-buffer engine. At size 1 it is plain training: flat parameters and gradients, fp32 masters, one fused update per group.

One law of gradients: each microbatch back-propagates its additive share of one global loss; a gradient is the plain sum of shares.
Nothing here waits for the device: the norm, the clip factor and the decision to skip stay on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.batch import Batch, StepBatch
from headway.kernels.attention import mask_of
from headway.model.head import Head, ModelOut
from headway.model.transformer import Transformer
from headway.objective.base import Exchange, MetricSums, Objective, StepInfo
from headway.optim.base import Guard, Hyper, Optimizer
from headway.optim.groups import OBJECTIVE, Group
from headway.parallel.buffer import FrozenBuffer, Slot, TrainBuffer
from headway.parallel.engine import ReadTensor, StateTensor, StepResult, Update
from headway.runtime.seed import derive


@dataclass(frozen=True)
class Settings:
    """What the engine needs to know beside the model, the objective and the groups."""

    device: torch.device
    dtype: torch.dtype
    clip: float | None
    chunk_tokens: int
    seed: int


class FlatEngine:
    """Implements parallel.engine.Engine."""

    def __init__(
        self,
        model: Transformer,
        objective: Objective,
        groups: Sequence[Group],
        optimizer: Optimizer,
        settings: Settings,
        exchange: Exchange,
    ) -> None:
        self.model, self.objective, self.optimizer, self.settings, self.exchange = model, objective, optimizer, settings, exchange
        self.groups = list(groups)
        self.touched: set[str] = set()
        """Parameters whose gradient has arrived in this step."""
        self.homes = _homes(model, objective)
        shapes = {name: tuple(owner._parameters[leaf].shape) for name, (owner, leaf) in self.homes.items()}  # pyright: ignore[reportOptionalMemberAccess]
        training = {name for group in groups for name in group.names}
        self.buffers = [
            TrainBuffer.allocate(group, shapes, self._dtype_of(group.names[0]), settings.device, optimizer.slots) for group in groups
        ]
        frozen = [name for name in shapes if name not in training]
        self.frozen = FrozenBuffer.allocate(frozen, shapes, settings.dtype, settings.device)
        self.masters: dict[str, Tensor] = {}
        for buffer in self.buffers:
            for slot in buffer.slots:
                self._adopt(slot, buffer.master)
                self._register(slot, buffer.param, buffer.grad)
        for slot in self.frozen.slots:
            self._adopt(slot, self.frozen.param)
            self._register(slot, self.frozen.param, None)
        self.skipped = torch.zeros((), dtype=torch.float32, device=settings.device)
        self._norm_scale = torch.ones((), dtype=torch.float32, device=settings.device)

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if name.startswith(OBJECTIVE) else self.settings.dtype

    @torch.no_grad()
    def _adopt(self, slot: Slot, flat: Tensor) -> None:
        """Remember where a parameter's full-precision value lies, and bring along the value it has."""
        owner, leaf = self.homes[slot.name]
        value = owner._parameters[leaf]
        self.masters[slot.name] = slot.view(flat)
        if value is not None and not value.is_meta:
            self.masters[slot.name].copy_(value)

    def _register(self, slot: Slot, flat: Tensor, grad: Tensor | None) -> None:
        owner, leaf = self.homes[slot.name]
        parameter = nn.Parameter(slot.view(flat), requires_grad=grad is not None)
        if grad is not None:
            # Gradients come in whatever precision they were computed in and are added up in fp32. They are taken over by a hook rather than
            # accumulated in `.grad` of another dtype, which torch.compile refuses to trace.
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(partial(self._take, slot.name, slot.view(grad)))
        owner._parameters[leaf] = parameter

    @torch.no_grad()
    def _take(self, name: str, total: Tensor, parameter: Tensor) -> None:
        """Add one microbatch's gradient to the flat buffer; the first of a step overwrites what the last step left."""
        assert parameter.grad is not None
        if name in self.touched:
            total.add_(parameter.grad)
        else:
            total.copy_(parameter.grad)
            self.touched.add(name)
        parameter.grad = None

    def forward_backward(self, batch: StepBatch, at: StepInfo) -> StepResult:
        """Accumulate the gradients of one step."""
        self.model.train()
        loss = torch.zeros((), dtype=torch.float32, device=self.settings.device)
        sums: MetricSums = {}
        for index, micro in enumerate(batch.microbatches):
            self._reseed(at.step, batch.first_microbatch + index)
            moved = micro.to(self.settings.device)
            outcome = self.objective.loss(self._forward(moved), moved, at, self.exchange)
            share = outcome.share(batch.totals)
            share.backward()
            loss += share.detach()
            _add(sums, outcome.metrics)
        return StepResult(loss, sums)

    def _forward(self, batch: Batch) -> ModelOut:
        hidden = self.model(batch.tokens, batch.position, mask_of(batch))
        return ModelOut(Head(hidden, self.model.head_weight, self.settings.chunk_tokens))

    def _reseed(self, step: int, microbatch: int) -> None:
        torch.manual_seed(derive(self.settings.seed, "microbatch", step, microbatch))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], at: StepInfo) -> MetricSums:
        """Metric sums over batches, without gradients or dropout."""
        self.flush()
        self.model.eval()
        sums: MetricSums = {}
        for micro in batches:
            moved = micro.to(self.settings.device)
            _add(sums, self.objective.loss(self._forward(moved), moved, at, self.exchange).metrics)
        return sums

    @torch.no_grad()
    def update(self, hypers: dict[str, Hyper]) -> Update:
        """Clip by the exact global norm, step every buffer, clear the gradients. A step with a non-finite norm changes nothing."""
        self._clear_untouched()
        norms = torch._foreach_norm([buffer.grad for buffer in self.buffers])
        norm = torch.linalg.vector_norm(torch.stack(norms))
        found_inf = norm.isfinite().logical_not().float()
        scale = self._norm_scale if self.settings.clip is None else ((norm + 1e-6) / self.settings.clip).clamp(min=1.0)
        guard = Guard(scale.nan_to_num(1.0), found_inf)
        for buffer in self.buffers:
            state = {slot: [tensor] for slot, tensor in buffer.state.items()}
            self.optimizer.update([buffer.master], [buffer.grad], state, [buffer.steps], hypers[buffer.group.name], guard)
            buffer.refresh()
        self.skipped += found_inf
        return Update(norm, found_inf)

    def _clear_untouched(self) -> None:
        """Parameters that had no part in this step have no gradient, whatever the last step left in the buffer."""
        for buffer in self.buffers:
            for slot in buffer.slots:
                if slot.name not in self.touched:
                    slot.view(buffer.grad).zero_()
        self.touched.clear()

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        missing = set(self.homes)
        for name, value in values:
            self.masters[name].copy_(value)
            missing.discard(name)
        self._refresh()
        return sorted(missing)

    def _refresh(self) -> None:
        for buffer in self.buffers:
            buffer.refresh()

    def tensors(self) -> Iterator[StateTensor]:
        """Master weights and optimizer state of what trains, the parameter itself of what does not."""
        for buffer in self.buffers:
            for slot in buffer.slots:
                zero = (0,) * len(slot.shape)
                for role, flat in {"master": buffer.master, **buffer.state}.items():
                    yield slot.name, role, slot.shape, [(zero, slot.view(flat))]
        for slot in self.frozen.slots:
            yield slot.name, "param", slot.shape, [((0,) * len(slot.shape), slot.view(self.frozen.param))]

    def scalars(self) -> dict[str, Any]:
        """Updates done, per parameter (groups may be cut anew on resume), and steps skipped."""
        done = {slot.name: int(buffer.steps) for buffer in self.buffers for slot in buffer.slots}
        return {"steps": done, "skipped": int(self.skipped)}

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """Take back what tensors and scalars gave."""
        for name, role, _, boxes in self.tensors():
            for offset, view in boxes:
                view.copy_(read(name, role, offset, tuple(view.shape)))
        for buffer in self.buffers:
            buffer.steps.fill_(max(scalars["steps"].get(slot.name, 0) for slot in buffer.slots))
        self.skipped.fill_(scalars["skipped"])
        self._refresh()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters at full precision, by name, in the order of the model."""
        for name in self.homes:
            if not name.startswith(OBJECTIVE):
                yield name, self.masters[name]

    def flush(self) -> None:
        """Parameters are always current at size 1."""


def _homes(model: nn.Module, objective: Objective) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter is registered: name -> (module, attribute), in the order of the model."""
    homes: dict[str, tuple[nn.Module, str]] = {}
    roots: list[tuple[str, nn.Module]] = [("", model)]
    if objective.module is not None:
        roots.append((OBJECTIVE, objective.module))
    for prefix, root in roots:
        for path, module in root.named_modules():
            for leaf in module._parameters:
                if module._parameters[leaf] is not None:
                    homes[f"{prefix}{path + '.' if path else ''}{leaf}"] = (module, leaf)
    return homes


def _add(sums: MetricSums, more: MetricSums) -> None:
    for name, (total, weight) in more.items():
        before = sums.get(name)
        sums[name] = (total.detach(), weight.detach()) if before is None else (before[0] + total.detach(), before[1] + weight.detach())

"""The flat-buffer engine: whole parameters and gradients on every rank, fp32 masters and optimizer state cut over the shard group.

    shard group of 1      plain data parallelism: gradients all-reduced, every rank steps everything
    all ranks             ZeRO-1: gradients reduce-scattered, each rank steps its part, parameters all-gathered
    between               ZeRO-1.5: as ZeRO-1 inside a group, and the parts all-reduced across groups

One law of gradients: each microbatch and rank back-propagates its additive share of one global loss; a gradient is the plain sum of shares.
Nothing here waits for the device: the norm, the clip factor and the decision to skip stay on it, and are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.batch import Batch, StepBatch
from headway.model.base import Model
from headway.objective.base import MetricSums, Objective, StepInfo
from headway.optim.base import Guard, Hyper
from headway.optim.groups import OBJECTIVE, ParamGroup, is_wide
from headway.optim.scaler import Scaler
from headway.optim.state_storage import storage_of
from headway.parallel.engine import DTYPES, Box, EngineSpec, ReadTensor, StateTensor, StepResult, Update
from headway.parallel.flat.bucket import Bucket, InPlace, Reducer, make_buckets
from headway.parallel.flat.buffer import BucketSpan, BufferSharding, BufferSpec, FrozenBuffer, LocalSlice, Slot, TrainBuffer, boxes_of
from headway.parallel.flat.gather import ParameterGather
from headway.parallel.hooks.all_reduce import AllReduce
from headway.parallel.hooks.base import Hook, StatefulHook
from headway.parallel.hooks.compress import Compress
from headway.parallel.hooks.reduce_scatter import ReduceScatter
from headway.parallel.offload_optimizer import HostStateOptimizer, LocalTensors
from headway.parallel.passes import Passes
from headway.parallel.update import clip_guard, square_norm


class FlatEngine:
    """Implements parallel.engine.Engine."""

    def __init__(self, model: Model, objective: Objective, groups: Sequence[ParamGroup], spec: EngineSpec) -> None:
        self.model, self.spec, self.ranks, self.overlap = model, spec, spec.ranks, spec.parallel.overlap
        self.optimizer, self.scaler = spec.optim.build(), make_scaler(spec)
        self.groups = list(groups)
        self.passes = Passes(model, objective, spec)
        self.homes = parameter_homes(model, objective)
        self.shapes = {name: tuple(parameter_at(home).shape) for name, home in self.homes.items()}
        self._allocate()
        buckets = make_buckets(self.buffers, list(self.homes), self.ranks)
        self.reducer = Reducer(buckets, choose_hook(spec), overlap=self.overlap.reduce)
        self.gather = ParameterGather(buckets, self.ranks.shard)
        self._register_all()
        self._place_head()
        if self.ranks.shard.size > 1 and self.overlap.gather:
            self.gather.watch(model)
        self.skipped = torch.zeros((), dtype=torch.float32, device=spec.device)
        self._one = torch.ones((), dtype=torch.float32, device=spec.device)
        self.lets_go = spec.device.type == "cuda"
        """Gradients have no memory between an update and the backward that brings the next ones, when activations need it most."""
        self._squares: list[Tensor] = []
        """Sums of squares of buckets that were taken while others were still under way."""

    def _allocate(self) -> None:
        spec, shard = self.spec, self.ranks.shard
        cut = BufferSharding(max(1, spec.parallel.bucket_bytes // spec.grad_dtype.itemsize), shard.size, shard.rank)
        training = {name for group in self.groups for name in group.names}
        self.storage = storage_of(self.optimizer)
        self.streamed = HostStateOptimizer(self.optimizer, spec.device) if spec.state_on_host else None
        keep = BufferSpec(self.optimizer.slots, self.storage, spec.grad_dtype, spec.state_on_host)
        self.buffers = [
            TrainBuffer.allocate(group, self.shapes, self._dtype_of(group.names[0]), spec.device, cut, keep) for group in self.groups
        ]
        frozen = [name for name in self.shapes if name not in training]
        self.frozen = FrozenBuffer.allocate(frozen, self.shapes, self._dtype_of, spec.device)
        self._places: dict[str, tuple[TrainBuffer, BucketSpan, Slot]] = {
            slot.name: (buffer, span, slot) for buffer in self.buffers for span in buffer.spans for slot in span.slots
        }

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if is_wide(name) else self.spec.dtype

    def _register_all(self) -> None:
        """Put views of the flat buffers where the model has its parameters; values they already have come along."""
        given = [(name, parameter_at(home).detach()) for name, home in self.homes.items() if not parameter_at(home).is_meta]
        for name, (owner, leaf) in self.homes.items():
            place = self._places.get(name)
            if place is None:
                owner._parameters[leaf] = nn.Parameter(self.frozen.values[name], requires_grad=False)
                continue
            buffer, span, slot = place
            parameter = nn.Parameter(slot.view(buffer.param))
            # Gradients come in whatever precision they were computed in and are added up in fp32. They are taken over by a hook rather than
            # accumulated in `.grad` of another dtype, which torch.compile refuses to trace.
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(torch.no_grad()(partial(self.reducer.take, name, buffer.gradient(span, slot))))
            owner._parameters[leaf] = parameter
        self.fill(given)

    def _place_head(self) -> None:
        """The head's gradient, one of the largest, is computed where it will be reduced."""
        name = self.model.head_parameter
        if name in self._places and self._places[name][0].grads[0].dtype == torch.float32:
            buffer, span, slot = self._places[name]
            self.model.head_grad_buffer = InPlace(self.reducer, name, buffer.gradient(span, slot))

    def forward_backward(self, batch: StepBatch, at: StepInfo) -> StepResult:
        """Accumulate the gradients of one step and exchange them."""
        if isinstance(self.model.head_grad_buffer, InPlace):
            self.model.head_grad_buffer.reset()
        scale = None if self.scaler is None else self.scaler.scale
        result = self.passes.backward(batch, at, scale, self.reducer.begin_last)
        with torch.no_grad():
            self._squares = []
            ahead = self.overlap.step and self.reducer.hook is not None
            for bucket in self.reducer.finish():
                if ahead:
                    self._squares.append(square_norm([bucket.local_shard]))
        return self.passes.over_ranks(result)

    def rehearse(self, batch: StepBatch, at: StepInfo, *, apart: bool = False) -> None:
        """Forward and backward that leave nothing behind; gradients are not exchanged."""
        self.flush()
        with self.ranks.apart() if apart else nullcontext():
            self.passes.backward(batch, at, None, lambda: None)
        self.forget()

    def forget(self) -> None:
        """Drop gradients that were not brought to an end."""
        self.reducer.forget()
        if self.lets_go:
            for bucket in self.reducer.buckets:
                bucket.release()
        if isinstance(self.model.head_grad_buffer, InPlace):
            self.model.head_grad_buffer.reset()
        for home in self.homes.values():
            parameter_at(home).grad = None

    def evaluate(self, batches: Iterable[Batch], at: StepInfo) -> MetricSums:
        """Metric sums over all ranks' batches, without gradients or dropout."""
        self.flush()
        return self.passes.evaluate(batches, at)

    @torch.no_grad()
    def update(self, hypers: dict[str, Hyper], skip: Tensor | None = None) -> Update:
        """Clip by the exact global norm, step this rank's parts, send them to the others. A step with a non-finite norm changes nothing."""
        square = torch.stack(self._squares).sum() if self._squares else square_norm([bucket.local_shard for bucket in self.reducer.buckets])
        self.ranks.shard.all_reduce(square).wait()
        scale = self._one if self.scaler is None else self.scaler.scale.clone()
        norm, guard, overflow = clip_guard(square.sqrt().float(), self.spec.optim.clip, scale, skip)
        self._step_all(hypers, guard)
        self.skipped += guard.found_inf
        if self.scaler is not None:
            self.scaler.update(overflow)
        if self.lets_go:
            for bucket in self.reducer.buckets:
                bucket.release()
        return Update(norm, guard.found_inf, scale)

    def _step_all(self, hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update what this rank owns, and start sending it: to be gathered now, or one bucket ahead of the next forward."""
        is_cut = self.ranks.shard.size > 1
        if is_cut:
            self.gather.begin()
        if is_cut and self.overlap.step:
            for bucket in self.gather.buckets:
                self._step([bucket], hypers, guard)
                if not self.overlap.gather:
                    self.gather.start_next()
        else:
            for buffer in self.buffers:
                self._step([bucket for bucket in self.reducer.buckets if bucket.buffer is buffer], hypers, guard)
        if is_cut and self.overlap.gather:
            self.gather.start_next()
        elif is_cut:
            self.gather.flush()

    def _step(self, buckets: list[Bucket], hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update the own parts of some buckets of one buffer, in one call."""
        buffer, spans = buckets[0].buffer, [bucket.span for bucket in buckets]
        if len(buckets) > 1 and buckets[0].local_shard.dtype != torch.float32:  # one fp32 copy at a time
            for bucket in buckets:
                self._step([bucket], hypers, guard)
            return
        state = {role: [buffer.packed(span, flat) for span in spans] for role, flat in buffer.state.items()}
        steps = [buffer.steps[span.index] for span in spans]
        masters = [buffer.packed(span, buffer.master) for span in spans]
        grads, hyper = [bucket.local_shard.float() for bucket in buckets], hypers[buffer.group.name]
        copies = None if buffer.param is buffer.master else [buffer.local_shard(span, buffer.param) for span in spans]
        if self.streamed is not None:
            self.streamed.update(LocalTensors(masters, grads, state, steps), hyper, guard, copies)
        else:
            self.optimizer.update(masters, grads, state, steps, hyper, guard, copies)

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        self.flush()
        missing = set(self.homes)
        for name, value in values:
            missing.discard(name)
            place = self._places.get(name)
            if place is None:
                self.frozen.values[name].copy_(value)
                continue
            buffer, span, slot = place
            held = buffer.local_slice(span, slot)
            if held is not None and buffer.master is not buffer.param:
                buffer.master[held.at : held.at + held.size].copy_(value.reshape(-1)[held.first : held.first + held.size])
            slot.view(buffer.param).copy_(value)
        return sorted(missing)

    def tensors(self) -> Iterator[StateTensor]:
        """Master weights and optimizer state of what trains, the parameter itself of what does not; replicas share the writing."""
        self.flush()
        replicas, mine = self.ranks.replicate.size, self.ranks.replicate.rank
        for index, (name, buffer, slot, held) in enumerate(self._held()):
            boxes = boxes_of(slot.shape, held.first, held.size) if held is not None and index % replicas == mine else []
            for role in ("master", *self.optimizer.slots):
                flat = self._read(buffer, role, held) if boxes and held is not None else buffer.master
                yield name, role, slot.shape, [(offset, _view(flat, start, shape)) for offset, shape, start in boxes]
        for name, value in self.frozen.values.items():
            whole: list[Box] = [((0,) * value.dim(), value)] if self.ranks.reduce.rank == 0 else []
            yield name, "param", self.shapes[name], whole
        if isinstance(self.reducer.hook, StatefulHook):
            yield from self.reducer.hook.tensors(self.ranks.reduce)

    def _read(self, buffer: TrainBuffer, role: str, held: LocalSlice) -> Tensor:
        """What this rank holds of one parameter in one role, flat."""
        if role == "master":
            return buffer.master[held.at : held.at + held.size]
        return self.storage.read(buffer.state, role, held.at, held.size)

    def _write(self, buffer: TrainBuffer, role: str, held: LocalSlice, values: Tensor) -> None:
        if role == "master":
            buffer.master[held.at : held.at + held.size].copy_(values)
        else:
            self.storage.write(buffer.state, role, held.at, values)

    def _held(self) -> Iterator[tuple[str, TrainBuffer, Slot, LocalSlice | None]]:
        for name, (buffer, span, slot) in self._places.items():
            yield name, buffer, slot, buffer.local_slice(span, slot)

    def scalars(self) -> dict[str, Any]:
        """Updates done, per parameter (groups may be cut anew on resume), steps skipped, and the loss scale."""
        done = {
            slot.name: int(count)
            for buffer in self.buffers
            for span, count in zip(buffer.spans, buffer.steps, strict=True)
            for slot in span.slots
        }
        hook, scaler = self.reducer.hook, self.scaler
        return {
            "steps": done,
            "skipped": int(self.skipped),
            "scaler": None if scaler is None else scaler.scalars(),
            "hook": hook.scalars(self.ranks.reduce) if isinstance(hook, StatefulHook) else None,
        }

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """Take back what tensors and scalars gave, whatever layout it was saved from."""
        self.flush()
        for name, buffer, slot, held in self._held():
            if held is None:
                continue
            boxes = boxes_of(slot.shape, held.first, held.size)
            for role in ("master", *self.optimizer.slots):
                self._write(buffer, role, held, torch.cat([read(name, role, offset, shape).reshape(-1) for offset, shape, _ in boxes]))
        for name, value in self.frozen.values.items():
            value.copy_(read(name, "param", (0,) * value.dim(), self.shapes[name]))
        for buffer in self.buffers:
            buffer.steps.fill_(max(scalars["steps"].get(slot.name, 0) for slot in buffer.slots))
            for span in buffer.spans:
                buffer.refresh(span)
        self.skipped.fill_(scalars["skipped"])
        if self.scaler is not None and scalars.get("scaler") is not None:
            self.scaler.load(scalars["scaler"])
        if isinstance(self.reducer.hook, StatefulHook) and scalars.get("hook") is not None:
            self.reducer.hook.load(read, scalars["hook"], self.ranks.reduce, self.spec.device)
        self.gather.begin()
        self.gather.flush()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters at full precision, bucket by bucket in the order of the model."""
        return ((name, value) for name, value in self._whole() if not name.startswith(OBJECTIVE))

    @property
    def masters(self) -> dict[str, Tensor]:
        """Every parameter at full precision, by name; all ranks ask together."""
        found = dict(self._whole())
        return {name: found[name] for name in self.homes}

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        self.flush()
        for bucket in self.gather.buckets:
            buffer, span = bucket.buffer, bucket.span
            part = buffer.packed(span, buffer.master).to(self.spec.device)
            whole = part
            if self.ranks.shard.size > 1:
                whole = torch.empty(span.stop - span.start, dtype=torch.float32, device=part.device)
                self.ranks.shard.all_gather(whole, part).wait()
            for slot in reversed(span.slots):
                yield slot.name, _view(whole, slot.start - span.start, slot.shape)
        yield from self.frozen.values.items()

    def flush(self) -> None:
        """Wait until all parameters, and what lies in host memory, are current."""
        self.gather.flush()
        if self.streamed is not None:
            self.streamed.flush()

    @property
    def state_bytes(self) -> int:
        """Bytes of fp32 masters and optimizer state on this rank."""
        return sum(flat.nbytes for buffer in self.buffers for flat in (buffer.master, *buffer.state.values()))


def make_scaler(spec: EngineSpec) -> Scaler | None:
    """The loss scale of fp16; other precisions need none."""
    return Scaler(spec.loss_scale, spec.device) if spec.dtype == torch.float16 else None


def choose_hook(spec: EngineSpec) -> Hook | None:
    """The hook of a recipe; without one, the plain sum that fits the layout. None: nothing to exchange."""
    parallel, mesh = spec.parallel, spec.ranks.mesh
    if parallel.hook is not None:
        return parallel.hook.build(spec.device)
    if mesh.reduce == 1:
        return None
    if DTYPES[parallel.reduce_dtype] != spec.grad_dtype:
        return Compress(parallel.reduce_dtype, spec.device)
    return ReduceScatter(spec.device) if mesh.shard > 1 else AllReduce()


def _view(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    return flat[start : start + torch.Size(shape).numel()].view(shape)


def parameter_homes(model: nn.Module, objective: Objective) -> dict[str, tuple[nn.Module, str]]:
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


def parameter_at(home: tuple[nn.Module, str]) -> nn.Parameter:
    """The parameter registered at a home."""
    parameter = home[0]._parameters[home[1]]
    assert parameter is not None
    return parameter

"""The flat-buffer engine: whole parameters and gradients on every rank, fp32 masters and optimizer state sharded over the shard group.

    shard group of 1      plain data parallelism: gradients are all-reduced, every rank updates everything
    all ranks             ZeRO-1: gradients are reduce-scattered, each rank updates its shard, parameters are all-gathered
    in between            ZeRO-1.5: as ZeRO-1 inside a group, and shards are all-reduced across groups

Each microbatch and rank back-propagates its additive share of one global loss; a gradient is the plain sum of shares.
Nothing here waits for the device: the norm, the clip factor and the decision to skip stay on it, and are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.batch import StepBatch
from headway.model.base import Model
from headway.optim.base import Guard, Hyper, takes_narrow_gradients
from headway.optim.groups import ParamGroup
from headway.parallel.base import (
    BaseEngine,
    LocalModel,
    ParamShard,
    beside,
    parameter_at,
    square_norm,
    view,
)
from headway.parallel.box import StateTensor
from headway.parallel.engine import DTYPES, EngineSpec, ReadTensor, StepResult
from headway.parallel.flat.bucket import Bucket, InPlace, Reducer, make_buckets, taking
from headway.parallel.flat.buffer import (
    BucketSpan,
    BufferSharding,
    BufferSpec,
    FrozenBuffer,
    Slot,
    TrainBuffer,
    boxes_of,
)
from headway.parallel.flat.gather import ParameterGather
from headway.parallel.hooks.all_reduce import AllReduce
from headway.parallel.hooks.base import Hook, StatefulHook
from headway.parallel.hooks.compress import Compress
from headway.parallel.hooks.reduce_scatter import ReduceScatter
from headway.parallel.offload_optimizer import LocalTensors
from headway.parallel.pipeline.gather import held_scalars, merge_scalars, over_stages
from headway.parallel.pipeline.passes import PipelinePasses
from headway.parallel.update_rules import WholeParameter, WholeState
from headway.tasks.base import StepInfo, Task


class FlatEngine(BaseEngine):
    """Implements parallel.engine.Engine."""

    def __init__(
        self,
        model: Model,
        objective: Task,
        groups: Sequence[ParamGroup],
        spec: EngineSpec,
        local: LocalModel,
    ) -> None:
        super().__init__(model, objective, groups, spec, local)
        self.overlap = spec.parallel.overlap
        self.sharers: Mapping[str, tuple[int, ...]] = (
            {} if local.part is None else local.part.sharers
        )
        """The ranks of the pipeline that hold a parameter, where those are several."""
        self._allocate()
        buckets = make_buckets(self.buffers, list(self.homes), self.ranks_of, self.sharers)
        self.reducer = Reducer(
            buckets, choose_hook(spec), overlap=self.overlap.reduce, share=self._sum_shared
        )
        if isinstance(self.passes, PipelinePasses):
            self.passes.end_last = self.reducer.end_last
        self.gather = ParameterGather(buckets)
        self._register_all()
        self._place_head()
        if self.ranks.shard.size > 1 and self.overlap.gather:
            self.gather.watch(model)
        self.frees_gradients = spec.device.type == "cuda"
        """Gradients have no memory between an update and the next backward, when activations need it most."""
        self._free_gradients()  # the first forward needs the memory too
        self._position = {name: index for index, name in enumerate(self.homes)}
        self._squares: list[tuple[Bucket, Tensor]] = []
        """Sums of squares of buckets, taken while other buckets were still being exchanged."""

    def _allocate(self) -> None:
        spec = self.spec
        shapes = {name: box.shape for name, box in self.boxes.items()}
        self.buffers = [
            TrainBuffer.allocate(
                group,
                shapes,
                self._dtype_of(group.names[0]),
                spec.device,
                self._sharding(group.names[0]),
                self._buffer_spec(group),
            )
            for group in self._groups_by_copy()
        ]
        training = {name for group in self.groups for name in group.names}
        frozen = [name for name in shapes if name not in training]
        self.frozen = FrozenBuffer.allocate(frozen, shapes, self._dtype_of, spec.device)
        self.slots: dict[str, tuple[TrainBuffer, BucketSpan, Slot]] = {
            slot.name: (buffer, span, slot)
            for buffer in self.buffers
            for span in buffer.spans
            for slot in span.slots
        }

    def _sharding(self, name: str) -> BufferSharding:
        """How the buffer with a parameter is divided."""
        shard = self.ranks_of(name).shard
        return BufferSharding(
            max(1, self.spec.parallel.bucket_bytes // self.spec.grad_dtype.itemsize),
            shard.size,
            shard.rank,
        )

    def _buffer_spec(self, group: ParamGroup) -> BufferSpec:
        rule, spec = self.rules[group.name], self.spec
        whole = rule if rule.matrices is not None else None
        largest = {name: self.boxes[name].largest for name in group.names}
        averages = rule.averages is not None
        return BufferSpec(
            rule.optimizer.slots,
            rule.storage,
            spec.grad_dtype,
            spec.state_on_host,
            whole,
            averages,
            largest,
        )

    def _groups_by_copy(self) -> Iterator[ParamGroup]:
        """The groups of what this rank holds; what several ranks of the tensor or pipeline axis hold has separate buffers, and so have
        experts that ranks share, in the same order on all of them."""
        for group in self.groups:
            held = {name: self.boxes[name] for name in group.names if self.holds(name)}
            kinds = {
                name: (box.copies, box.is_partial, self.sharers.get(name, ()), box.expert_ranks)
                for name, box in held.items()
            }
            for kind in sorted(set(kinds.values())):
                yield replace(group, names=tuple(name for name in held if kinds[name] == kind))

    def _dtype_of(self, name: str) -> torch.dtype:
        held = parameter_at(self.homes[name]).dtype
        if not held.is_floating_point:
            return held  # bytes of a quantised matrix
        return torch.float32 if self.specs[name].is_wide else self.spec.dtype

    def _register_all(self) -> None:
        """Put views of the flat buffers where the model has its parameters; values they already have are copied."""
        given = [
            (name, parameter_at(home).detach())
            for name, home in self.homes.items()
            if not parameter_at(home).is_meta
        ]
        for name, (owner, leaf) in self.homes.items():
            located = self.slots.get(name)
            if located is None:
                owner._parameters[leaf] = nn.Parameter(
                    self.frozen.values[name], requires_grad=False
                )
                continue
            buffer, span, slot = located
            parameter = nn.Parameter(slot.view(buffer.param))
            # Gradients come in the precision they were computed in and are added up in fp32. They are taken over by a hook rather than
            # accumulated in `.grad` of another dtype, which torch.compile refuses to trace.
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(
                taking(self.reducer, name, buffer.gradient(span, slot))
            )
            owner._parameters[leaf] = parameter
        self.fill(given)

    def _place_head(self) -> None:
        """The head's gradient, one of the largest, is computed where it will be reduced."""
        name = self.model.head_parameter
        if name in self.slots and self.slots[name][0].grads[0].dtype == torch.float32:
            buffer, span, slot = self.slots[name]
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
                self._sum_copies(bucket)
                if ahead and self._counts(bucket):
                    self._squares.append((bucket, square_norm([bucket.local_shard])))
        return self.passes.over_ranks(result)

    def _sum_copies(self, bucket: Bucket) -> None:
        """Add up the gradients of ranks of the tensor axis that hold the same elements, where each has a part of them."""
        box = self.boxes[bucket.span.slots[0].name]
        if box.is_partial:
            self.local.sums[box.copies].all_reduce(bucket.local_shard).wait()

    def _sum_shared(self, bucket: Bucket) -> None:
        """Add up the gradients of stages that hold the same parameters, before they are exchanged with other rows' ranks."""
        assert isinstance(self.passes, PipelinePasses)
        self.passes.links.sum_over(bucket.flat, bucket.sharers)

    def _free_gradients(self) -> None:
        if self.frees_gradients:
            for bucket in self.reducer.buckets:
                bucket.release()

    def _counts(self, bucket: Bucket) -> bool:
        """Whether this rank counts a bucket in norms."""
        return not self.boxes[bucket.span.slots[0].name].is_copy

    def _square_norm(self) -> Tensor:
        plain, experts = self._square_of(experts=False), None
        if self.ranks.expert.size > 1:
            experts = self._square_of(experts=True)
        return self._sum_over_model(plain, experts)

    def _square_of(self, *, experts: bool) -> Tensor:
        """The squares of this rank's shards: of experts that ranks share, or of everything else."""

        def wanted(bucket: Bucket) -> bool:
            return (self.boxes[bucket.span.slots[0].name].expert_ranks > 1) == experts

        if self._squares:
            found = [square for bucket, square in self._squares if wanted(bucket)]
            return torch.stack(found).sum() if found else torch.zeros_like(self._squares[0][1])
        counted = [
            bucket.local_shard
            for bucket in self.reducer.buckets
            if self._counts(bucket) and wanted(bucket)
        ]
        return beside(square_norm(counted), self.spec.device)

    def _step(self, hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update this rank's shards and start sending them: all at once, or one bucket ahead of the next forward."""
        is_sharded = self.ranks.shard.size > 1
        if is_sharded:
            self.gather.begin()
        if is_sharded and self.overlap.step:
            for bucket in self.gather.buckets:
                self._step_buckets([bucket], hypers, guard)
                if not self.overlap.gather:
                    self.gather.start_next()
        else:
            for buffer in self.buffers:
                self._step_buckets(
                    [bucket for bucket in self.reducer.buckets if bucket.buffer is buffer],
                    hypers,
                    guard,
                )
        if is_sharded and self.overlap.gather:
            self.gather.start_next()
        elif is_sharded:
            self.gather.flush()
        self._free_gradients()

    def _step_buckets(self, buckets: list[Bucket], hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update this rank's shards of some buckets of one buffer, in one call."""
        buffer, spans = buckets[0].buffer, [bucket.span for bucket in buckets]
        rule = self.rules[buffer.group.name].optimizer
        as_is = self.host_state is None and takes_narrow_gradients(rule, self.spec.device)
        if (
            len(buckets) > 1 and buckets[0].local_shard.dtype != torch.float32 and not as_is
        ):  # one fp32 copy at a time
            for bucket in buckets:
                self._step_buckets([bucket], hypers, guard)
            return
        if buffer.whole_state is not None:
            self._step_whole(buckets, buffer.whole_state, hypers, guard)
            return
        tensors = LocalTensors(
            [buffer.packed(span, buffer.master) for span in spans],
            [bucket.local_shard if as_is else bucket.local_shard.float() for bucket in buckets],
            {
                role: [buffer.packed(span, flat) for span in spans]
                for role, flat in buffer.state.items()
            },
            [buffer.steps[span.index] for span in spans],
        )
        copies = (
            None
            if buffer.param is buffer.master
            else [buffer.local_shard(span, buffer.param) for span in spans]
        )
        self._apply(buffer.group.name, tensors, hypers[buffer.group.name], guard, copies)

    def _step_whole(
        self,
        buckets: list[Bucket],
        state: dict[str, WholeState],
        hypers: dict[str, Hyper],
        guard: Guard,
    ) -> None:
        """Update the parameters that lie in this rank's shards of some buckets, each as a whole, in one call."""
        buffer, members = buckets[0].buffer, list[WholeParameter]()
        for bucket in buckets:
            span, slots = bucket.span, buffer.local_slots(bucket.span)
            begin, shard = span.shard_range(buffer.sharding)[0], bucket.local_shard.float()
            master = buffer.packed(span, buffer.master)
            steps = buffer.steps[span.index].repeat(len(slots)).unbind()
            for slot, step in zip(slots, steps, strict=True):
                copy = None if buffer.param is buffer.master else slot.view(buffer.param)
                members.append(
                    WholeParameter(
                        slot.view(master, begin),
                        slot.view(shard, begin),
                        state[slot.name],
                        step,
                        copy,
                    )
                )
        self._apply_whole(buffer.group.name, members, hypers[buffer.group.name], guard)
        for bucket in buckets:  # also those of which this rank updates nothing
            buffer.steps[bucket.span.index] += 1 - guard.found_inf

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        self.flush()
        missing = set(self.homes)
        for name, whole in values:
            if name in self.shapes and not self.holds(name):
                continue  # another stage's
            missing.discard(name)
            value, located = self.boxes[name].of(whole), self.slots.get(name)
            if located is None:
                self.frozen.values[name].copy_(value)
                continue
            buffer, span, slot = located
            local = buffer.local_slice(span, slot)
            if local is not None and buffer.master is not buffer.param:
                buffer.master[local.at : local.at + local.size].copy_(
                    value.reshape(-1)[local.first : local.first + local.size]
                )
            slot.view(buffer.param).copy_(value)
        return sorted(missing)

    def shards(self) -> Iterator[ParamShard]:
        """This rank's slices of what trains, in the order of the buffers; then what does not train, whole."""
        for name, (buffer, span, slot) in self.slots.items():
            local = buffer.local_slice(span, slot)
            whole = None if buffer.whole_state is None else buffer.whole_state.get(name, {})
            if local is None:
                yield ParamShard(name, [], buffer.master[:0], True, buffer.state, whole_state=whole)
                continue
            boxes = [
                (self.boxes[name].part(box), start)
                for box, start in boxes_of(slot.shape, local.first, local.size)
            ]
            yield ParamShard(
                name,
                boxes,
                buffer.master[local.at : local.at + local.size],
                True,
                buffer.state,
                local.at,
                whole_state=whole,
            )
        for name, value in self.frozen.values.items():
            yield ParamShard(
                name,
                [(self.boxes[name], 0)],
                value.view(-1),
                False,
                {},
                is_whole=True,
            )

    def tensors(self) -> Iterator[StateTensor]:
        """As BaseEngine.tensors, and what the hook keeps."""
        yield from super().tensors()
        if isinstance(self.reducer.hook, StatefulHook):
            for name, role, shape, boxes in self.reducer.hook.tensors(self.ranks.reduce):
                kept = [] if self.boxes[name].of_earlier_stage else boxes
                yield StateTensor(name, role, shape, kept)

    def scalars(self) -> dict[str, Any]:
        """As BaseEngine.scalars, and what the hook keeps."""
        hook = self.reducer.hook
        kept = hook.scalars(self.ranks.reduce) if isinstance(hook, StatefulHook) else None
        return super().scalars() | {
            "hook": None if kept is None else merge_scalars(self.ranks.pipeline.gather(kept))
        }

    def _updates_done(self) -> dict[str, int]:
        counts = [
            (span, count)
            for buffer in self.buffers
            for span, count in zip(buffer.spans, buffer.steps, strict=True)
        ]
        return {slot.name: int(count) for span, count in counts for slot in span.slots}

    def _set_updates_done(self, done: dict[str, int]) -> None:
        for buffer in self.buffers:
            buffer.steps.fill_(max(done.get(slot.name, 0) for slot in buffer.slots))

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """As BaseEngine.load; then compute parameters are set from the master weights on all ranks."""
        super().load(read, scalars)
        self._show(averages=False)
        if isinstance(self.reducer.hook, StatefulHook) and scalars.get("hook") is not None:
            own = (
                scalars["hook"]
                if self.local.part is None
                else held_scalars(scalars["hook"], self.holds)
            )
            self.reducer.hook.load(read, own, self.ranks.reduce, self.spec.device)

    @torch.no_grad()
    def _show(self, *, averages: bool) -> None:
        """As BaseEngine._show, on all ranks."""
        self.gather.flush()
        for buffer in self.buffers:
            rule = self.rules[buffer.group.name].averages
            for span in buffer.spans:
                if rule is None or averages:
                    buffer.refresh(span)
                    continue
                state = {role: [buffer.packed(span, flat)] for role, flat in buffer.state.items()}
                target = buffer.local_shard(span, buffer.param)
                rule.set_training_weights(
                    [buffer.packed(span, buffer.master)],
                    state,
                    [buffer.steps[span.index]],
                    [target],
                )
        self.gather.begin()
        self.gather.flush()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters at full precision, bucket by bucket in the order of the model."""
        for name, value in self._whole():
            if "objective" not in self.specs[name].groups:
                yield name, value

    @property
    def masters(self) -> dict[str, Tensor]:
        """Every parameter at full precision, by name; all ranks call it together."""
        found = dict(self._whole())
        return {name: found[name] for name in self.shapes}

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of all stages, one after another: no rank ever holds the whole model."""
        if self.local.part is None:
            return self._held()
        counted = (
            (name, value) for name, value in self._held() if not self.boxes[name].of_earlier_stage
        )
        return over_stages(counted, self.ranks.pipeline)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        self.flush()
        for bucket in self.gather.buckets:
            buffer, span = bucket.buffer, bucket.span
            shard = buffer.packed(span, buffer.master).to(self.spec.device)
            whole, group = shard, bucket.ranks.shard
            if group.size > 1:
                whole = torch.empty(
                    span.stop - span.start, dtype=torch.float32, device=shard.device
                )
                group.all_gather(whole, shard).wait()
            for slot in sorted(span.slots, key=lambda slot: self._position[slot.name]):
                yield (
                    slot.name,
                    self._whole_box(slot.name, view(whole, slot.start - span.start, slot.shape)),
                )
        for name, value in self.frozen.values.items():
            yield name, self._whole_box(name, value)

    def flush(self) -> None:
        """Wait until all parameters and state in host memory are current."""
        self.gather.flush()
        for host in (self.host_state or {}).values():
            host.flush()

    @property
    def state_bytes(self) -> int:
        """Bytes of fp32 masters and optimizer state on this rank."""
        flat = sum(
            flat.nbytes
            for buffer in self.buffers
            for flat in (buffer.master, *buffer.state.values())
        )
        whole = (
            held
            for buffer in self.buffers
            for state in (buffer.whole_state or {}).values()
            for held in state.values()
        )
        return flat + sum(held.nbytes for held in whole)


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

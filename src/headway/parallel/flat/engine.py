"""The flat-buffer engine: whole parameters and gradients on every rank, sharded optimizer state.

The size of the shard group, over which fp32 masters and optimizer state are sharded, decides:

    1             plain data parallelism: gradients are all-reduced, every rank updates everything
    all ranks     ZeRO-1 (arXiv:1910.02054): gradients are reduce-scattered, each rank updates its
                  shard, parameters are all-gathered
    in between    ZeRO-1.5: as ZeRO-1 inside a group, and shards are all-reduced across groups

Each microbatch and rank back-propagates its additive share of one global loss; a gradient is the
plain sum of shares. Nothing here waits for the device: the norm, the clip factor and the decision
to skip stay on it, and are the same on all ranks.
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
    on_device,
    parameter_at,
    square_norm,
    view,
)
from headway.parallel.box import StateTensor
from headway.parallel.engine import DTYPES, EngineSpec, ReadTensor, StepResult
from headway.parallel.flat.bucket import Bucket, InPlace, Reducer, gradient_hook, make_buckets
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
from headway.parallel.hooks.base import Hook, StatefulHook
from headway.parallel.update_rules import LocalTensors, WholeParameter, WholeState
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
        self.sharers: Mapping[str, tuple[int, ...]] = {}
        """The ranks of the pipeline that hold a parameter, where those are several."""
        if local.part is not None:
            self.sharers = local.part.sharers
        self._allocate()

        buckets = make_buckets(self.buffers, list(self.param_owners), self.ranks_of, self.sharers)
        self.reducer = Reducer(
            buckets, choose_hook(spec), overlap=self.overlap.reduce, share=self._sum_shared
        )
        if local.part is not None:
            from headway.parallel.pipeline.microbatch_runner import PipelineRunner

            assert isinstance(self.runner, PipelineRunner)
            self.runner.end_last = self.reducer.end_last

        self.gather = ParameterGather(buckets)
        self._register_all()
        self._place_head()
        if self.ranks.shard.size > 1 and self.overlap.gather:
            self.gather.watch(model)

        self.frees_gradients = spec.device.type == "cuda"
        """Gradients have no memory between an update and the next backward, when activations need
        it most."""
        self._free_gradients()  # the first forward needs the memory too

        self._position = {name: index for index, name in enumerate(self.param_owners)}
        self._squares: list[tuple[Bucket, Tensor]] = []
        """Sums of squares of buckets, taken while other buckets were still being exchanged."""

    def _allocate(self) -> None:
        """Make a buffer for each kind of parameters that trains, and one for what does not."""
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
        self.slots: dict[str, tuple[TrainBuffer, BucketSpan, Slot]] = {}
        """Where each parameter that trains lies."""
        for buffer in self.buffers:
            for span in buffer.spans:
                for slot in span.slots:
                    self.slots[slot.name] = (buffer, span, slot)

    def _sharding(self, name: str) -> BufferSharding:
        """How the buffer with a parameter is divided."""
        shard = self.ranks_of(name).shard
        bucket_elements = self.spec.parallel.bucket_bytes // self.spec.grad_dtype.itemsize
        return BufferSharding(max(1, bucket_elements), shard.size, shard.rank)

    def _buffer_spec(self, group: ParamGroup) -> BufferSpec:
        """What the rule of a group needs besides parameters."""
        rule = self.rules[group.name]
        whole = None
        if rule.matrices is not None:
            whole = rule
        return BufferSpec(
            rule.optimizer.slots,
            rule.storage,
            self.spec.grad_dtype,
            on_host=self.spec.state_on_host,
            whole=whole,
            averages=rule.averages is not None,
            largest={name: self.boxes[name].largest for name in group.names},
        )

    def _groups_by_copy(self) -> Iterator[ParamGroup]:
        """The groups of what this rank holds, divided by which ranks share it.

        A bucket is exchanged as a whole, so all its parameters need the same exchanges: over the
        same copies on the tensor axis, the same stages of the pipeline, the same expert ranks.
        Kinds are sorted, so that all ranks have their buffers in the same order.
        """
        for group in self.groups:
            kinds: dict[str, tuple[int, bool, tuple[int, ...], int]] = {}
            for name in group.names:
                if self.holds(name):
                    box = self.boxes[name]
                    stages = self.sharers.get(name, ())
                    kinds[name] = (box.copies, box.is_partial, stages, box.expert_ranks)
            for kind in sorted(set(kinds.values())):
                yield replace(group, names=tuple(name for name in kinds if kinds[name] == kind))

    def _dtype_of(self, name: str) -> torch.dtype:
        """The precision in which the model computes with a parameter."""
        dtype = parameter_at(self.param_owners[name]).dtype
        if not dtype.is_floating_point:
            return dtype  # bytes of a quantised matrix
        if self.specs[name].keeps_float32:
            return torch.float32
        return self.spec.dtype

    def _register_all(self) -> None:
        """Put views of the flat buffers where the model has its parameters.

        Values that exist already (the objective's parameters) are copied into them.
        """
        values = [
            (name, parameter_at(owner).detach())
            for name, owner in self.param_owners.items()
            if not parameter_at(owner).is_meta
        ]
        for name, (owner, leaf) in self.param_owners.items():
            if name not in self.slots:
                owner._parameters[leaf] = nn.Parameter(
                    self.frozen.values[name], requires_grad=False
                )
                continue
            buffer, span, slot = self.slots[name]
            parameter = nn.Parameter(slot.view(buffer.param))
            # Gradients come in the precision they were computed in and are added up in fp32. They
            # are taken over by a hook rather than accumulated in `.grad` of another dtype, which
            # torch.compile refuses to trace.
            parameter.grad_dtype = None
            parameter.register_post_accumulate_grad_hook(
                gradient_hook(self.reducer, name, buffer.gradient(span, slot))
            )
            owner._parameters[leaf] = parameter
        self.fill(values)

    def _place_head(self) -> None:
        """Let the head's gradient, one of the largest, be computed where it will be reduced."""
        name = self.model.head_parameter
        if name not in self.slots:
            return
        buffer, span, slot = self.slots[name]
        # The head adds up its gradient chunk by chunk, which needs fp32.
        if buffer.grads[0].dtype == torch.float32:
            self.model.head_grad_buffer = InPlace(self.reducer, name, buffer.gradient(span, slot))

    def forward_backward(self, batch: StepBatch, step_info: StepInfo) -> StepResult:
        """Accumulate the gradients of one step and exchange them."""
        if isinstance(self.model.head_grad_buffer, InPlace):
            self.model.head_grad_buffer.reset()
        scale = None
        if self.scaler is not None:
            scale = self.scaler.scale
        result = self.runner.backward(batch, step_info, scale, self.reducer.begin_last)

        with torch.no_grad():
            self._squares = []
            squares_early = self.overlap.step and self.reducer.hook is not None
            for bucket in self.reducer.finish():
                self._sum_copies(bucket)
                # While later buckets are still on their way; else `_square_of` does it at once.
                if squares_early and self._counts_in_norm(bucket):
                    self._squares.append((bucket, square_norm([bucket.local_shard])))
        return self.runner.over_ranks(result)

    def _sum_copies(self, bucket: Bucket) -> None:
        """Add up partial gradients of tensor ranks that hold the same elements (`is_partial`)."""
        box = self.boxes[bucket.span.slots[0].name]
        if box.is_partial:
            self.local.sums[box.copies].all_reduce(bucket.local_shard).wait()

    def _sum_shared(self, bucket: Bucket) -> None:
        """Add up the gradients of stages that hold the same parameters.

        This comes before the exchange with ranks that read other rows.
        """
        from headway.parallel.pipeline.microbatch_runner import PipelineRunner

        assert isinstance(self.runner, PipelineRunner)
        self.runner.links.sum_over(bucket.flat, bucket.sharers)

    def _free_gradients(self) -> None:
        if self.frees_gradients:
            for bucket in self.reducer.buckets:
                bucket.release()

    def _counts_in_norm(self, bucket: Bucket) -> bool:
        """Whether this rank counts a bucket in norms: of ranks that hold the same, the first."""
        return not self.boxes[bucket.span.slots[0].name].is_copy

    def _square_norm(self) -> Tensor:
        plain = self._square_of(experts=False)
        experts = None
        if self.ranks.expert.size > 1:
            experts = self._square_of(experts=True)
        return self._sum_over_model(plain, experts)

    def _square_of(self, *, experts: bool) -> Tensor:
        """The squares of this rank's shards: of experts that ranks share, or of everything else."""

        def wanted(bucket: Bucket) -> bool:
            return (self.boxes[bucket.span.slots[0].name].expert_ranks > 1) == experts

        if self._squares:
            squares = [square for bucket, square in self._squares if wanted(bucket)]
            if squares:
                return torch.stack(squares).sum()
            return torch.zeros_like(self._squares[0][1])
        shards = [
            bucket.local_shard
            for bucket in self.reducer.buckets
            if self._counts_in_norm(bucket) and wanted(bucket)
        ]
        return on_device(square_norm(shards), self.spec.device)

    def _step(self, hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update this rank's shards and start gathering them.

        All at once, or one bucket ahead of the next forward.
        """
        is_sharded = self.ranks.shard.size > 1
        if is_sharded:
            self.gather.begin()

        if is_sharded and self.overlap.step:
            # In the order of forward, so that the first bucket travels while others are updated.
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
            # The modules of the next forward wait for the others and start them (`watch`).
            self.gather.start_next()
        elif is_sharded:
            self.gather.flush()
        self._free_gradients()

    def _step_buckets(self, buckets: list[Bucket], hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update this rank's shards of some buckets of one buffer, in one call."""
        buffer = buckets[0].buffer
        spans = [bucket.span for bucket in buckets]
        rule = self.rules[buffer.group.name].optimizer
        reads_narrow = self.host_state is None and takes_narrow_gradients(rule, self.spec.device)

        # Gradients in bf16 need a copy in fp32: of one bucket at a time, to bound the memory.
        is_narrow = buckets[0].local_shard.dtype != torch.float32
        if len(buckets) > 1 and is_narrow and not reads_narrow:
            for bucket in buckets:
                self._step_buckets([bucket], hypers, guard)
            return
        if buffer.whole_state is not None:
            self._step_whole(buckets, buffer.whole_state, hypers, guard)
            return

        gradients = [bucket.local_shard for bucket in buckets]
        if not reads_narrow:
            gradients = [gradient.float() for gradient in gradients]
        tensors = LocalTensors(
            [buffer.packed(span, buffer.master) for span in spans],
            gradients,
            {
                role: [buffer.packed(span, flat) for span in spans]
                for role, flat in buffer.state.items()
            },
            [buffer.steps[span.index] for span in spans],
        )
        copies = None
        if buffer.param is not buffer.master:
            copies = [buffer.local_shard(span, buffer.param) for span in spans]
        self._apply(buffer.group.name, tensors, hypers[buffer.group.name], guard, copies)

    def _step_whole(
        self,
        buckets: list[Bucket],
        state: dict[str, WholeState],
        hypers: dict[str, Hyper],
        guard: Guard,
    ) -> None:
        """Update the whole parameters in this rank's shards of some buckets, in one call."""
        buffer = buckets[0].buffer
        members = list[WholeParameter]()
        for bucket in buckets:
            span = bucket.span
            slots = buffer.local_slots(span)
            shard_start, _ = span.shard_range(buffer.sharding)
            gradient = bucket.local_shard.float()
            master = buffer.packed(span, buffer.master)
            # The rule adds to its counters, so each parameter gets a copy of the bucket's; the
            # bucket's own is advanced below.
            steps = buffer.steps[span.index].repeat(len(slots)).unbind()
            for slot, step in zip(slots, steps, strict=True):
                copy = None
                if buffer.param is not buffer.master:
                    copy = slot.view(buffer.param)
                members.append(
                    WholeParameter(
                        slot.view(master, shard_start),
                        slot.view(gradient, shard_start),
                        state[slot.name],
                        step,
                        copy,
                    )
                )
        self._apply_whole(buffer.group.name, members, hypers[buffer.group.name], guard)
        # Also of buckets of which this rank updates nothing: counters are the same on all ranks.
        for bucket in buckets:
            buffer.steps[bucket.span.index] += 1 - guard.found_inf

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        self.flush()
        missing = set(self.param_owners)
        for name, whole in values:
            if name in self.shapes and not self.holds(name):
                continue  # another pipeline stage has it
            missing.discard(name)
            value = self.boxes[name].of(whole)
            if name not in self.slots:
                self.frozen.values[name].copy_(value)
                continue
            buffer, span, slot = self.slots[name]
            local = buffer.local_slice(span, slot)
            if local is not None and buffer.master is not buffer.param:
                # From the value itself: the compute parameter is rounded.
                master = buffer.master[local.packed_start : local.packed_start + local.size]
                master.copy_(value.reshape(-1)[local.first : local.first + local.size])
            slot.view(buffer.param).copy_(value)
        return sorted(missing)

    def shards(self) -> Iterator[ParamShard]:
        """This rank's slices of what trains, in the order of the buffers.

        Then what does not train, whole.
        """
        for name, (buffer, span, slot) in self.slots.items():
            local = buffer.local_slice(span, slot)
            whole = None
            if buffer.whole_state is not None:
                whole = buffer.whole_state.get(name, {})
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
                buffer.master[local.packed_start : local.packed_start + local.size],
                True,
                buffer.state,
                local.packed_start,
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
                if self.boxes[name].of_earlier_stage:
                    boxes = []  # that stage saves it
                yield StateTensor(name, role, shape, boxes)

    def scalars(self) -> dict[str, Any]:
        """As BaseEngine.scalars, and what the hook keeps."""
        hook = self.reducer.hook
        merged = None
        if isinstance(hook, StatefulHook):
            from headway.parallel.pipeline.gather import merge_scalars

            stages = self.ranks.pipeline.gather(hook.scalars(self.ranks.reduce))
            merged = merge_scalars(stages)
        return super().scalars() | {"hook": merged}

    def _updates_done(self) -> dict[str, int]:
        done: dict[str, int] = {}
        for buffer in self.buffers:
            for span, count in zip(buffer.spans, buffer.steps, strict=True):
                done |= dict.fromkeys((slot.name for slot in span.slots), int(count))
        return done

    def _set_updates_done(self, done: dict[str, int]) -> None:
        # A buffer has one count: a parameter that joined its group on resume takes the largest.
        for buffer in self.buffers:
            buffer.steps.fill_(max(done.get(slot.name, 0) for slot in buffer.slots))

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """As BaseEngine.load; then compute parameters are set from the masters on all ranks."""
        super().load(read, scalars)
        self._set_compute_params(averages=False)
        if isinstance(self.reducer.hook, StatefulHook) and scalars.get("hook") is not None:
            stored = scalars["hook"]
            if self.local.part is not None:
                from headway.parallel.pipeline.gather import held_scalars

                stored = held_scalars(stored, self.holds)
            self.reducer.hook.load(read, stored, self.ranks.reduce, self.spec.device)

    @torch.no_grad()
    def _set_compute_params(self, *, averages: bool) -> None:
        """As BaseEngine._set_compute_params, on all ranks."""
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
        for name, value in self._whole_parameters():
            if "objective" not in self.specs[name].groups:
                yield name, value

    @property
    def masters(self) -> dict[str, Tensor]:
        """Every parameter at full precision, by name; all ranks call it together."""
        values = dict(self._whole_parameters())
        return {name: values[name] for name in self.shapes}

    def _whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of all stages, one after another: no rank ever holds the whole model."""
        if self.local.part is None:
            return self._stage_parameters()
        from headway.parallel.pipeline.gather import over_stages

        # A parameter that several stages share comes from the first of them.
        values = (
            (name, value)
            for name, value in self._stage_parameters()
            if not self.boxes[name].of_earlier_stage
        )
        return over_stages(values, self.ranks.pipeline)

    def _stage_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every whole parameter of this rank's stages; the memory of one bucket at a time."""
        self.flush()
        for bucket in self.gather.buckets:
            buffer = bucket.buffer
            span = bucket.span
            shard = buffer.packed(span, buffer.master).to(self.spec.device)
            whole = shard
            group = bucket.ranks.shard
            if group.size > 1:
                whole = torch.empty(
                    span.stop - span.start, dtype=torch.float32, device=shard.device
                )
                group.all_gather(whole, shard).wait()
            # Slots are in backward order; exports want that of the model.
            for slot in sorted(span.slots, key=lambda slot: self._position[slot.name]):
                box = view(whole, slot.start - span.start, slot.shape)
                yield slot.name, self._gather_whole(slot.name, box)
        for name, value in self.frozen.values.items():
            yield name, self._gather_whole(name, value)

    def flush(self) -> None:
        """Wait until all parameters and state in host memory are current."""
        self.gather.flush()
        for host in (self.host_state or {}).values():
            host.flush()

    @property
    def state_bytes(self) -> int:
        """Bytes of fp32 masters and optimizer state on this rank."""
        total = 0
        for buffer in self.buffers:
            tensors = [buffer.master, *buffer.state.values()]
            for state in (buffer.whole_state or {}).values():
                tensors += state.values()
            total += sum(tensor.nbytes for tensor in tensors)
        return total


def choose_hook(spec: EngineSpec) -> Hook | None:
    """The hook of a recipe; without one, the plain sum that fits the layout.

    None: nothing to exchange.
    """
    parallel = spec.parallel
    mesh = spec.ranks.mesh
    if parallel.hook is not None:
        return parallel.hook.build(spec.device)
    if mesh.reduce == 1:
        return None
    # Sums are exchanged in another precision than that in which they were accumulated.
    if DTYPES[parallel.reduce_dtype] != spec.grad_dtype:
        from headway.parallel.hooks.compress import Compress

        return Compress(parallel.reduce_dtype, spec.device)
    if mesh.shard > 1:
        from headway.parallel.hooks.reduce_scatter import ReduceScatter

        return ReduceScatter(spec.device)
    from headway.parallel.hooks.all_reduce import AllReduce

    return AllReduce()

"""The FSDP2 engine: parameters, gradients and optimizer state are sharded.

Blocks are gathered when they are needed.

torch's `fully_shard` moves the parameters. Gradients (plain sums over ranks), clipping, the update
rule and checkpoints are those of the flat engine, so that a run may change between both. A shard is
a box along dim 0:

    rows of a parameter     [ 0 .. c-1 | c .. 2c-1 | ... | .. n-1 ]     c = ceil(n / ranks)
    rank of the group          0          1          ...                  the last may have fewer

The sharded parameters are the fp32 masters; the compute dtype exists only while a block is
gathered. What does not train is stored in the compute dtype. Head gates and parameters of the
objective stay whole on every rank, in fp32. The root (embedding, final norm, head) stays gathered
from its forward to the end of backward, because the head is applied after the model has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.data.batch import StepBatch
from headway.model.base import Model
from headway.model.layout import GATES
from headway.model.moe import MixtureOfExperts
from headway.optim.base import Guard, Hyper
from headway.optim.groups import ParamGroup
from headway.parallel.base import (
    BaseEngine,
    LocalModel,
    ParamShard,
    needs_gradient,
    on_device,
    parameter_at,
    square_norm,
)
from headway.parallel.box import Box
from headway.parallel.collectives import RankGroups
from headway.parallel.engine import DTYPES, EngineSpec, ReadTensor, StepResult
from headway.parallel.fsdp_matrices import ShardedMember, owners, update_whole
from headway.parallel.update_rules import LocalTensors, WholeParameter
from headway.tasks.base import StepInfo, Task


@dataclass
class LocalParameter:
    """What this rank holds of one parameter."""

    name: str
    parameter: nn.Parameter
    offset: tuple[int, ...]
    """Of its rows, in the box that this rank's model holds."""
    group: str | None
    """The group it trains in; None: it does not."""
    state: dict[str, Tensor]
    """Optimizer state, flat, in the form of its storage; for a rule of whole parameters in its
    shapes, on the owner only."""
    steps: Tensor
    """fp32: updates that were really done."""
    owner: int | None = None
    """The rank of the shard group that updates it as a whole; None: every rank updates what it
    holds."""
    has_whole_state: bool = False
    average: Tensor | None = None
    """What is kept, if the optimizer averages the weights that train; the parameter holds the
    latter."""

    @property
    def trained(self) -> Tensor:
        """The local values the model computes with.

        They are fp32, or of the compute dtype if the parameter does not train.
        """
        return _local(self.parameter.detach())

    @property
    def master(self) -> Tensor:
        """The local values that are kept."""
        if self.average is None:
            return self.trained
        return self.average

    @property
    def is_whole(self) -> bool:
        """Every rank holds all of it."""
        return not isinstance(self.parameter, DTensor)

    @property
    def gradient(self) -> Tensor:
        """The local gradient; zero for a parameter without a part in the step."""
        gradient = self.parameter.grad
        if gradient is None:
            return torch.zeros_like(self.master)
        return _local(gradient)


class FsdpEngine(BaseEngine):
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
        self.runner.waits_in_layers = True  # for the parameters of every block
        group_of = {name: group.name for group in groups for name in group.names}
        for name, (owner, leaf) in self.param_owners.items():
            parameter = parameter_at((owner, leaf))
            if name in group_of or self.specs[name].keeps_float32:
                parameter.requires_grad_(name in group_of)
            elif parameter.is_floating_point():
                # What does not train needs no fp32 master. (Bytes of a quantised matrix stay.)
                narrow = parameter.detach().to(spec.dtype)
                owner._parameters[leaf] = nn.Parameter(narrow, requires_grad=False)
        shard_model(model, spec)

        # In front of the hook with which FSDP2 looks for inputs that need a gradient.
        if GATES in group_of:
            first_block = next(iter(model.blocks().values()))
            first_block.register_forward_pre_hook(needs_gradient, prepend=True)
        if objective.module is not None:
            objective.module.to(spec.device, torch.float32)

        # Experts have other shard groups, so their owners are counted apart.
        whole = {
            name: self.boxes[name].stacked_shape
            for name in self.rule_of
            if self._is_updated_whole(name)
        }
        experts = {
            name: shape for name, shape in whole.items() if self.boxes[name].expert_ranks > 1
        }
        self.owners = owners(
            {name: shape for name, shape in whole.items() if name not in experts},
            self.ranks.shard.size,
        )
        self.owners |= owners(experts, self._expert_ranks.shard.size)

        self.parts = {
            name: self._local_parameter(name, parameter_at(owner), group_of.get(name))
            for name, owner in self.param_owners.items()
        }
        self._grads: dict[str, Tensor] = {}
        """The gradients of an update, between its norm and its step."""

    def _is_updated_whole(self, name: str) -> bool:
        """Whether a sharded parameter is updated as a whole, by its owner."""
        return self.rule_of[name].matrices is not None and not self.specs[name].keeps_float32

    def _local_parameter(
        self, name: str, parameter: nn.Parameter, group: str | None
    ) -> LocalParameter:
        """This rank's part of a parameter that `shard_model` has sharded, with optimizer state."""
        shape = self.boxes[name].shape
        shard = self.ranks_of(name).shard
        local = _local(parameter.detach())
        offset = (0,) * len(shape)
        if isinstance(parameter, DTensor):
            # As torch chunks dim 0: ceil(rows / ranks) each, until there are no more.
            rows_per_rank = -(-shape[0] // shard.size)
            offset = (min(shard.rank * rows_per_rank, shape[0]), *offset[1:])

        rule = None
        if group is not None:
            rule = self.rules[group]
        state = dict[str, Tensor]()
        owner = self.owners.get(name)
        if rule is not None and rule.matrices is not None:
            # Without an owner every rank holds and updates all of it.
            if owner in (None, shard.rank):
                state = rule.allocate_whole(shape, local.device)
        elif rule is not None:
            home = local.device
            pin = False
            if self.host_state is not None:
                home = torch.device("cpu")
                pin = local.is_cuda
            state = rule.storage.allocate(rule.optimizer.slots, local.numel(), home, pin=pin)

        steps = torch.zeros((), dtype=torch.float32, device=local.device)
        average = None
        if rule is not None and rule.averages is not None:
            average = torch.zeros_like(local)
        return LocalParameter(
            name,
            parameter,
            offset,
            group,
            state,
            steps,
            owner,
            has_whole_state=rule is not None and rule.matrices is not None,
            average=average,
        )

    def forward_backward(self, batch: StepBatch, step_info: StepInfo) -> StepResult:
        """Accumulate the gradients of one step.

        FSDP2 exchanges them during the last microbatch's backward.
        """
        self._synchronize(False)
        scale = None
        if self.scaler is not None:
            scale = self.scaler.scale
        result = self.runner.backward(batch, step_info, scale, lambda: self._synchronize(True))

        # FSDP2 does not know the parameters that are whole on every rank.
        for part in self._training():
            if part.is_whole:
                part.parameter.grad = part.gradient
                self.ranks.reduce.all_reduce(part.parameter.grad).wait()
        return self.runner.over_ranks(result)

    def _synchronize(self, on: bool) -> None:
        """Let FSDP2 exchange gradients in the next backward, or keep them to add up."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(on)
        self.model.set_is_last_backward(on)

    def _training(self) -> list[LocalParameter]:
        """What trains, in the order of the model."""
        return [part for part in self.parts.values() if part.group is not None]

    def _square_norm(self) -> Tensor:
        parts = self._training()
        device = self.spec.device
        self._grads = {part.name: part.gradient for part in parts}
        self._sum_copies()

        plain: list[Tensor] = []
        experts: list[Tensor] = []
        whole: list[Tensor] = []
        for part in parts:
            box = self.boxes[part.name]
            gradient = self._grads[part.name]
            if part.is_whole:
                whole.append(gradient)
            elif box.is_copy:
                continue  # another rank of the tensor axis counts it
            elif box.expert_ranks > 1:
                experts.append(gradient)
            else:
                plain.append(gradient)
        square = self._sum_over_model(
            on_device(square_norm(plain), device), on_device(square_norm(experts), device)
        )
        # The same on every rank, so they are counted after the sum over ranks.
        return square + on_device(square_norm(whole), device)

    def _sum_copies(self) -> None:
        """Add up partial gradients of tensor ranks that hold the same elements (`is_partial`)."""
        for copies, group in self.local.sums.items():
            partial = [
                grad
                for name, grad in self._grads.items()
                if self.boxes[name].is_partial and self.boxes[name].copies == copies
            ]
            # One exchange for all gradients of a precision.
            for dtype in {grad.dtype for grad in partial}:
                grads = [grad for grad in partial if grad.dtype == dtype]
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                group.all_reduce(flat).wait()
                sizes = [grad.numel() for grad in grads]
                for grad, total in zip(grads, flat.split(sizes), strict=True):
                    grad.copy_(total.view(grad.shape))

    def _step(self, hypers: dict[str, Hyper], guard: Guard) -> None:
        for group in self.groups:
            members = [self.parts[name] for name in group.names]
            # A rank may have no rows of a small parameter, such as a norm of few channels.
            filled = [part for part in members if part.master.numel()]
            if self.rules[group.name].matrices is not None:
                self._step_whole(group.name, members, hypers[group.name], guard)
            elif filled:
                tensors = LocalTensors(
                    [part.master.view(-1) for part in filled],
                    [self._grads[part.name].reshape(-1) for part in filled],
                    {role: [part.state[role] for part in filled] for role in filled[0].state},
                    [part.steps for part in filled],
                )
                copies = [part.trained.view(-1) for part in filled if part.average is not None]
                self._apply(group.name, tensors, hypers[group.name], guard, copies or None)
            # The rule has counted what it updated here; counters are the same on all ranks.
            for part in members:
                if not part.master.numel() or part.has_whole_state:
                    part.steps += 1 - guard.found_inf
                part.parameter.grad = None
        self._grads = {}

    def _step_whole(
        self, group: str, members: list[LocalParameter], hyper: Hyper, guard: Guard
    ) -> None:
        """Update whole parameters: those every rank holds here, the others on their owners."""

        def update(parameters: Sequence[WholeParameter]) -> None:
            self._apply_whole(group, parameters, hyper, guard)

        update(
            [
                WholeParameter(part.master, self._grads[part.name], part.state, part.steps.clone())
                for part in members
                if part.is_whole
            ]
        )
        sharded = {
            part.name: ShardedMember(
                self.boxes[part.name].shape,
                part.master,
                self._grads[part.name],
                part.state,
                part.steps,
            )
            for part in members
            if not part.is_whole
        }
        for of_experts, shard in ((False, self.ranks.shard), (True, self._expert_ranks.shard)):
            exchanged = {
                name: member
                for name, member in sharded.items()
                if (self.boxes[name].expert_ranks > 1) == of_experts
            }
            update_whole(exchanged, self.owners, shard, update)

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        self.flush()
        missing = set(self.parts)
        for name, whole in values:
            missing.discard(name)
            part = self.parts[name]
            value = self.boxes[name].of(whole)
            if not part.is_whole:
                first_row = part.offset[0]
                value = value[first_row : first_row + part.master.shape[0]]
            part.master.copy_(value)
            if part.average is not None:
                part.trained.copy_(part.average)
        return sorted(missing)

    def shards(self) -> Iterator[ParamShard]:
        """This rank's rows of every parameter."""
        for part in self.parts.values():
            local = part.master
            boxes = []
            if local.numel():
                boxes = [(self.boxes[part.name].part(Box(part.offset, tuple(local.shape))), 0)]
            whole_state = None
            if part.has_whole_state:
                whole_state = part.state
            yield ParamShard(
                part.name,
                boxes,
                local.view(-1),
                part.group is not None,
                part.state,
                is_whole=part.is_whole,
                whole_state=whole_state,
            )

    def _updates_done(self) -> dict[str, int]:
        return {part.name: int(part.steps) for part in self._training()}

    def _set_updates_done(self, done: dict[str, int]) -> None:
        for part in self.parts.values():
            part.steps.fill_(done.get(part.name, 0))

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters at full precision, by name, in the order of the model."""
        with self.with_averages():
            for name, part in self.parts.items():
                if "objective" in self.specs[name].groups:
                    continue
                if isinstance(part.parameter, DTensor):
                    box = part.parameter.full_tensor()
                else:
                    box = part.master
                yield name, self._gather_whole(name, box)

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """As BaseEngine.load; then parameters are set from what is kept."""
        super().load(read, scalars)
        # Leaving the context sets the weights that train; without averages there is nothing to do.
        with self.with_averages():
            pass

    @torch.no_grad()
    def _set_compute_params(self, *, averages: bool) -> None:
        """As BaseEngine._set_compute_params, and free what was gathered before."""
        self.flush()
        for part in self._training():
            rule = self.rule_of[part.name].averages
            if rule is None or part.average is None or not part.average.numel():
                continue
            if averages:
                part.trained.copy_(part.average)
            else:
                state = {role: [tensor] for role, tensor in part.state.items()}
                rule.set_training_weights(
                    [part.average.view(-1)], state, [part.steps], [part.trained.view(-1)]
                )

    def flush(self) -> None:
        """Free gathered parameters, so that the next forward gathers current ones.

        Wait for copies to host memory.
        """
        for host in (self.host_state or {}).values():
            host.flush()
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def state_bytes(self) -> int:
        """Bytes of fp32 masters and optimizer state on this rank."""
        return sum(
            tensor.nbytes
            for part in self._training()
            for tensor in (part.master, *part.state.values())
        )


def shard_model(model: Model, spec: EngineSpec) -> None:
    """Apply `fully_shard` to the experts that ranks share, to every block, then to the rest.

    Allocate what this rank holds, all zero.
    """
    param_dtype = None
    if spec.dtype != torch.float32:
        param_dtype = spec.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=DTYPES[spec.parallel.reduce_dtype],
        cast_forward_inputs=False,
    )
    mesh = _device_mesh(spec.ranks, spec.device.type)
    float32_names = {
        param_spec.name for param_spec in model.param_specs() if param_spec.keeps_float32
    }
    whole = {
        parameter for name, parameter in model.named_parameters() if name in float32_names
    } or None
    reshard = spec.parallel.fsdp.reshard_after_forward

    # From the inside to the outside: a call takes what no earlier call has taken.
    if spec.ranks.expert.size > 1:
        _shard_experts(model, spec, policy)
    for block in model.blocks().values():
        fully_shard(
            block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, ignored_params=whole
        )
    # The root stays gathered: the head is applied after the model's forward has returned.
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=whole
    )

    model.to_empty(device=spec.device)
    with torch.no_grad():
        for parameter in model.parameters():
            _local(parameter).zero_()

    # Plain sums: every rank back-propagates its share of one loss, so nothing is averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _device_mesh(ranks: RankGroups, device_type: str) -> DeviceMesh:
    """torch's mesh of the ranks that share a parameter: [shard], or [replicate, shard] (HSDP)."""
    shard = ranks.shard.handle
    replicate = ranks.replicate.handle
    sizes = ranks.mesh
    assert shard is not None
    if replicate is None:
        return DeviceMesh.from_group(shard, device_type, mesh_dim_names=("shard",))
    # Ranks are numbered pipeline, data x context, tensor: those of a reduce group are `tensor`
    # apart, and `first` is the first rank of this one.
    outer, tensor = divmod(sizes.rank, sizes.tensor)
    first = outer // sizes.reduce * sizes.reduce * sizes.tensor + tensor
    layout = torch.arange(first, first + sizes.reduce * sizes.tensor, sizes.tensor).view(
        sizes.replicate, sizes.shard
    )
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=layout, mesh_dim_names=("replicate", "shard")
    )


def _shard_experts(model: Model, spec: EngineSpec, policy: MixedPrecisionPolicy) -> None:
    """Apply `fully_shard` to the experts of every block.

    They are gathered from the block's beginning on, while attention computes.
    """
    mesh = _expert_mesh(spec.ranks, spec.device.type)
    reshard = spec.parallel.fsdp.reshard_after_forward
    # Offload of activations must know all parameters of a block when it begins.
    waits = "activations" in spec.memory.offload
    for block in model.blocks().values():
        for mixture in block.modules():
            if isinstance(mixture, MixtureOfExperts):
                experts = fully_shard(
                    mixture.experts, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy
                )
                block.register_forward_pre_hook(_gather_hook(experts, wait=waits))


def _gather_hook(
    experts: FSDPModule, *, wait: bool
) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A forward pre-hook that starts gathering experts; with `wait` it waits for them."""

    def gather(_block: nn.Module, _inputs: tuple[Any, ...]) -> None:
        experts.unshard(async_op=not wait)

    return gather


def _expert_mesh(ranks: RankGroups, device_type: str) -> DeviceMesh:
    """The ranks that hold the same experts: groups with a shard each, or one rank alone."""
    sizes = ranks.mesh
    shard = ranks.expert_shard
    replicate = ranks.expert_replicate
    members = next(group for group in sizes.groups("expert_reduce") if sizes.rank in group)
    inner = shard.handle
    if inner is None:
        # torch wants a group even of one rank; ranks with others need not take part in making it.
        inner = dist.new_group([sizes.rank], use_local_synchronization=True)
    assert isinstance(inner, dist.ProcessGroup)
    if replicate.handle is None:
        return DeviceMesh.from_group(inner, device_type, mesh_dim_names=("shard",))
    layout = torch.tensor(members).view(replicate.size, shard.size)
    return DeviceMesh.from_group(
        [replicate.handle, inner], device_type, mesh=layout, mesh_dim_names=("replicate", "shard")
    )


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor

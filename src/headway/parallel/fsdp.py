"""The FSDP2 engine: parameters, gradients and optimizer state are sharded; blocks are gathered when they are needed.

torch's `fully_shard` moves the parameters. Gradients (plain sums over ranks), clipping, the update rule and checkpoints are those of the
flat engine, so that a run may change between both. A shard is a box along dim 0:

    rows 0 .. n-1 of a parameter, ranks of a shard group:   [ 0 .. c-1 | c .. 2c-1 | ... ]   with c = ceil(n / ranks)

The sharded parameters are the fp32 masters; the compute dtype exists only while a block is gathered. What does not train is stored in the
compute dtype. Head gates and parameters of the objective stay whole on every rank, in fp32. The root (embedding, final norm, head) stays
gathered from its forward to the end of backward, because the head is applied after the model has returned.
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
    beside,
    needs_gradient,
    parameter_at,
    square_norm,
)
from headway.parallel.box import Box
from headway.parallel.collectives import RankGroups
from headway.parallel.engine import DTYPES, EngineSpec, ReadTensor, StepResult
from headway.parallel.fsdp_matrices import ShardedMember, owners, update_whole
from headway.parallel.offload_optimizer import LocalTensors
from headway.parallel.update_rules import WholeParameter
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
    """Optimizer state, flat, in the form of its storage; for a rule of whole parameters in its shapes, on the owner only."""
    steps: Tensor
    owner: int | None = None
    """The rank of the shard group that updates it as a whole; None: every rank updates what it holds."""
    has_whole_state: bool = False
    average: Tensor | None = None
    """What is kept, if the optimizer averages the weights that train; the parameter holds the latter."""

    @property
    def trained(self) -> Tensor:
        """The local values the model computes with: fp32, or the compute dtype of what does not train."""
        return _local(self.parameter.detach())

    @property
    def master(self) -> Tensor:
        """The local values that are kept."""
        return self.trained if self.average is None else self.average

    @property
    def is_whole(self) -> bool:
        """Every rank holds all of it."""
        return not isinstance(self.parameter, DTensor)

    @property
    def gradient(self) -> Tensor:
        """The local gradient; zero for a parameter without a part in the step."""
        gradient = self.parameter.grad
        return torch.zeros_like(self.master) if gradient is None else _local(gradient)


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
        self.passes.waits_in_layers = True
        group_of = {name: group.name for group in groups for name in group.names}
        for name, (owner, leaf) in self.homes.items():
            held = parameter_at((owner, leaf))
            if name in group_of or self.specs[name].is_wide:
                held.requires_grad_(name in group_of)
            elif not held.is_floating_point():
                continue  # bytes of a quantised matrix
            else:  # in the compute dtype only: what does not train needs no master
                owner._parameters[leaf] = nn.Parameter(
                    held.detach().to(spec.dtype), requires_grad=False
                )
        shard_model(model, spec)
        if (
            GATES in group_of
        ):  # before the hook with which FSDP2 looks for inputs that need a gradient
            next(iter(model.blocks().values())).register_forward_pre_hook(
                needs_gradient, prepend=True
            )
        if objective.module is not None:
            objective.module.to(spec.device, torch.float32)
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
            name: self._part(name, parameter_at(home), group_of.get(name))
            for name, home in self.homes.items()
        }
        self._grads: dict[str, Tensor] = {}
        """The gradients of an update, between its norm and its step."""

    def _is_updated_whole(self, name: str) -> bool:
        return self.rule_of[name].matrices is not None and not self.specs[name].is_wide

    def _part(self, name: str, parameter: nn.Parameter, group: str | None) -> LocalParameter:
        shape, shard = self.boxes[name].shape, self.ranks_of(name).shard
        local = _local(parameter.detach())
        offset = (0,) * len(shape)
        if isinstance(parameter, DTensor):
            offset = (min(shard.rank * -(-shape[0] // shard.size), shape[0]), *offset[1:])
        state, owner = dict[str, Tensor](), self.owners.get(name)
        rule = None if group is None else self.rules[group]
        if rule is not None and rule.matrices is not None:
            state = rule.allocate_whole(shape, local.device) if owner in (None, shard.rank) else {}
        elif rule is not None:
            home, pin = (
                (torch.device("cpu"), local.is_cuda)
                if self.host_state is not None
                else (local.device, False)
            )
            state = rule.storage.allocate(rule.optimizer.slots, local.numel(), home, pin=pin)
        steps = torch.zeros((), dtype=torch.float32, device=local.device)
        average = (
            torch.zeros_like(local) if rule is not None and rule.averages is not None else None
        )
        return LocalParameter(
            name,
            parameter,
            offset,
            group,
            state,
            steps,
            owner,
            rule is not None and rule.matrices is not None,
            average,
        )

    def forward_backward(self, batch: StepBatch, at: StepInfo) -> StepResult:
        """Accumulate the gradients of one step; FSDP2 exchanges them under the last microbatch's backward."""
        self._synchronize(False)
        scale = None if self.scaler is None else self.scaler.scale
        result = self.passes.backward(batch, at, scale, lambda: self._synchronize(True))
        for part in self._training():
            if part.is_whole:
                part.parameter.grad = part.gradient
                self.ranks.reduce.all_reduce(part.parameter.grad).wait()
        return self.passes.over_ranks(result)

    def _synchronize(self, on: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(on)
        self.model.set_is_last_backward(on)

    def _training(self) -> list[LocalParameter]:
        return [part for part in self.parts.values() if part.group is not None]

    def _square_norm(self) -> Tensor:
        parts, device = self._training(), self.spec.device
        self._grads = {part.name: part.gradient for part in parts}
        self._sum_copies()
        sharded: dict[bool, list[Tensor]] = {False: [], True: []}
        for part in parts:
            if not part.is_whole and not self.boxes[part.name].is_copy:
                sharded[self.boxes[part.name].expert_ranks > 1].append(self._grads[part.name])
        square = self._sum_over_model(
            *(beside(square_norm(grads), device) for grads in sharded.values())
        )
        return square + beside(
            square_norm([self._grads[part.name] for part in parts if part.is_whole]), device
        )

    def _sum_copies(self) -> None:
        """Add up the gradients of ranks of the tensor axis that hold the same elements, where each has a part of them."""
        for copies, group in self.local.sums.items():
            grads = [
                grad
                for name, grad in self._grads.items()
                if self.boxes[name].is_partial and self.boxes[name].copies == copies
            ]
            for dtype in {grad.dtype for grad in grads}:
                same = [grad for grad in grads if grad.dtype == dtype]
                flat = torch.cat([grad.reshape(-1) for grad in same])
                group.all_reduce(flat).wait()
                for grad, total in zip(
                    same, flat.split([grad.numel() for grad in same]), strict=True
                ):
                    grad.copy_(total.view(grad.shape))

    def _step(self, hypers: dict[str, Hyper], guard: Guard) -> None:
        for group in self.groups:
            members = [self.parts[name] for name in group.names]
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
            for part in members:
                if not part.master.numel() or part.has_whole_state:
                    part.steps += 1 - guard.found_inf
                part.parameter.grad = None
        self._grads = {}

    def _step_whole(
        self, group: str, members: list[LocalParameter], hyper: Hyper, guard: Guard
    ) -> None:
        """Update whole parameters: those every rank holds here, the others on their owners."""

        def update(some: Sequence[WholeParameter]) -> None:
            self._apply_whole(group, some, hyper, guard)

        here = [part for part in members if part.is_whole]
        update(
            [
                WholeParameter(part.master, self._grads[part.name], part.state, part.steps.clone())
                for part in here
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
        for experts, sharers in ((False, self.ranks.shard), (True, self._expert_ranks.shard)):
            some = {
                name: member
                for name, member in sharded.items()
                if (self.boxes[name].expert_ranks > 1) == experts
            }
            update_whole(some, self.owners, sharers, update)

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""
        self.flush()
        missing = set(self.parts)
        for name, whole in values:
            missing.discard(name)
            part, value = self.parts[name], self.boxes[name].of(whole)
            part.master.copy_(
                value
                if part.is_whole
                else value[part.offset[0] : part.offset[0] + part.master.shape[0]]
            )
            if part.average is not None:
                part.trained.copy_(part.average)
        return sorted(missing)

    def shards(self) -> Iterator[ParamShard]:
        """This rank's rows of every parameter."""
        for part in self.parts.values():
            local = part.master
            boxes = (
                [(self.boxes[part.name].part(Box(part.offset, tuple(local.shape))), 0)]
                if local.numel()
                else []
            )
            whole = part.state if part.has_whole_state else None
            yield ParamShard(
                part.name,
                boxes,
                local.view(-1),
                part.group is not None,
                part.state,
                is_whole=part.is_whole,
                whole_state=whole,
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
                if "objective" not in self.specs[name].groups:
                    box = (
                        part.parameter.full_tensor()
                        if isinstance(part.parameter, DTensor)
                        else part.master
                    )
                    yield name, self._whole_box(name, box)

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """As BaseEngine.load; then parameters are set from what is kept."""
        super().load(read, scalars)
        with self.with_averages():
            pass  # leaving sets what trains

    @torch.no_grad()
    def _show(self, *, averages: bool) -> None:
        """As BaseEngine._show, and free what was gathered before."""
        self.flush()
        for part in self._training():
            rule = self.rule_of[part.name].averages
            if rule is None or part.average is None or not part.average.numel():
                continue
            if averages:
                part.trained.copy_(part.average)
            else:
                state = {role: [held] for role, held in part.state.items()}
                rule.set_training_weights(
                    [part.average.view(-1)], state, [part.steps], [part.trained.view(-1)]
                )

    def flush(self) -> None:
        """Free gathered parameters, so that the next forward gathers current ones; wait for copies to host memory."""
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
    """Apply `fully_shard` to the experts that ranks share, to every block, then to the rest; allocate what this rank holds, all zero."""
    param_dtype = None if spec.dtype == torch.float32 else spec.dtype
    policy = MixedPrecisionPolicy(
        param_dtype=param_dtype,
        reduce_dtype=DTYPES[spec.parallel.reduce_dtype],
        cast_forward_inputs=False,
    )
    mesh = _device_mesh(spec.ranks, spec.device.type)
    wide = {one.name for one in model.param_specs() if one.is_wide}
    whole = {parameter for name, parameter in model.named_parameters() if name in wide} or None
    again = spec.parallel.fsdp.reshard_after_forward
    if spec.ranks.expert.size > 1:
        _shard_experts(model, spec, policy)
    for block in model.blocks().values():
        fully_shard(
            block, mesh=mesh, reshard_after_forward=again, mp_policy=policy, ignored_params=whole
        )
    fully_shard(
        model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=whole
    )
    model.to_empty(device=spec.device)
    with torch.no_grad():
        for parameter in model.parameters():
            _local(parameter).zero_()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _device_mesh(ranks: RankGroups, device_type: str) -> DeviceMesh:
    shard, replicate, sizes = ranks.shard.handle, ranks.replicate.handle, ranks.mesh
    assert shard is not None
    if replicate is None:
        return DeviceMesh.from_group(shard, device_type, mesh_dim_names=("shard",))
    outer, tensor = divmod(sizes.rank, sizes.tensor)
    first = outer // sizes.reduce * sizes.reduce * sizes.tensor + tensor
    layout = torch.arange(first, first + sizes.reduce * sizes.tensor, sizes.tensor).view(
        sizes.replicate, sizes.shard
    )
    return DeviceMesh.from_group(
        [replicate, shard], device_type, mesh=layout, mesh_dim_names=("replicate", "shard")
    )


def _shard_experts(model: Model, spec: EngineSpec, policy: MixedPrecisionPolicy) -> None:
    """Apply `fully_shard` to the experts of every block. They are gathered from the block's beginning on, while attention computes."""
    mesh, again = (
        _expert_mesh(spec.ranks, spec.device.type),
        spec.parallel.fsdp.reshard_after_forward,
    )
    waits = (
        "activations" in spec.memory.offload
    )  # which must know all parameters when a block begins
    for block in model.blocks().values():
        for mixture in block.modules():
            if isinstance(mixture, MixtureOfExperts):
                experts = fully_shard(
                    mixture.experts, mesh=mesh, reshard_after_forward=again, mp_policy=policy
                )
                block.register_forward_pre_hook(_gathering(experts, wait=waits))


def _gathering(experts: FSDPModule, *, wait: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that gathers experts, and waits until they are there."""

    def gather(_block: nn.Module, _inputs: tuple[Any, ...]) -> None:
        experts.unshard(async_op=not wait)

    return gather


def _expert_mesh(ranks: RankGroups, device_type: str) -> DeviceMesh:
    """The ranks that hold the same experts: groups with a shard each, or one rank alone."""
    sizes, shard, replicate = ranks.mesh, ranks.expert_shard, ranks.expert_replicate
    members = next(group for group in sizes.groups("expert_reduce") if sizes.rank in group)
    alone = (
        None
        if shard.handle is not None
        else dist.new_group([sizes.rank], use_local_synchronization=True)
    )
    inner = shard.handle or alone
    assert isinstance(inner, dist.ProcessGroup)
    if replicate.handle is None:
        return DeviceMesh.from_group(inner, device_type, mesh_dim_names=("shard",))
    layout = torch.tensor(members).view(replicate.size, shard.size)
    return DeviceMesh.from_group(
        [replicate.handle, inner], device_type, mesh=layout, mesh_dim_names=("replicate", "shard")
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""What both engines share: clipping and skipping of a step, the loss scale, and saving and loading of parameter shards.

A rank's model holds a box of every parameter (all of it, unless a tensor axis splits it). An engine shards that box and says which
elements of the whole parameter it holds, as `ParamShard`. Norms count each element of the whole model once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headway.data.batch import Batch
from headway.model.base import Model
from headway.model.layout import ParamSpec
from headway.optim.base import Guard, Hyper
from headway.optim.groups import OBJECTIVE, ParamGroup
from headway.optim.scaler import Scaler
from headway.parallel.box import Box, Ints, ParamBox, StateTensor
from headway.parallel.collectives import RankGroup, RankGroups
from headway.parallel.engine import EngineSpec, ReadTensor, Update
from headway.parallel.offload_optimizer import HostStateOptimizer, LocalTensors
from headway.parallel.passes import Passes
from headway.parallel.pipeline.passes import PipelinePasses
from headway.parallel.pipeline.stages import PipelinePart
from headway.parallel.update_rules import (
    UpdateRule,
    WholeParameter,
    WholeState,
    build_rules,
    check_whole,
)
from headway.runtime.device import wide
from headway.tasks.base import MetricSums, StepInfo, Task

NORM_BLOCK = 1024
"""Elements whose squares are added up in fp32 on the CPU. One fp32 sum over 50 million elements is 0.8 % too small; this is as fast."""


@dataclass(frozen=True)
class LocalModel:
    """The part of a model that this rank holds: boxes by name, and who adds up partial gradients, by the number of copies."""

    boxes: dict[str, ParamBox]
    sums: dict[int, RankGroup] = field(default_factory=dict)
    specs: dict[str, ParamSpec] = field(default_factory=dict)
    """Every parameter of the whole model and of the objective, in order."""
    part: PipelinePart | None = None
    """This rank's stages, where there is a pipeline."""


@dataclass(frozen=True)
class ParamShard:
    """What this rank holds of one parameter: boxes of the whole tensor, stored one after another in flat tensors."""

    name: str
    boxes: list[tuple[Box, int]]
    """Of the whole parameter, each with its start in `values`; empty: this rank holds nothing of it."""
    values: Tensor
    """Flat: the fp32 master weights, or the parameter itself if it does not train."""
    trains: bool
    state: dict[str, Tensor]
    """The optimizer's tensors in the form of its storage; this parameter begins at `state_start`."""
    state_start: int = 0
    is_whole: bool = False
    """Every rank of the shard group holds the same."""
    whole_state: WholeState | None = None
    """State of an optimizer of whole parameters: on the rank that updates this one, else empty. None: state is in `state`."""


class BaseEngine(ABC):
    """Holds the model, its parameter shards and optimizer state; implements parallel.engine.Engine together with a subclass."""

    def __init__(
        self,
        model: Model,
        objective: Task,
        groups: Sequence[ParamGroup],
        spec: EngineSpec,
        local: LocalModel,
    ) -> None:
        self.model, self.spec, self.ranks, part = model, spec, spec.ranks, local.part
        self.groups = list(groups)
        self.passes = (
            Passes(model, objective, spec)
            if part is None
            else PipelinePasses(model, objective, spec, part)
        )
        self.homes = parameter_homes(model, objective)
        self.local, self._expert_ranks = local, spec.ranks.of_experts()
        self.specs = local.specs
        self.shapes = {name: one.shape for name, one in self.specs.items()}
        self.boxes = {
            name: local.boxes[name] if name in local.boxes else self._objective_box(name)
            for name in self.homes
        }
        if part is not None:
            self.boxes = {
                name: replace(box, of_earlier_stage=part.is_copy(name))
                for name, box in self.boxes.items()
            }
        self.rules = build_rules(spec.optim, groups)
        """The update rule of every group."""
        self.rule_of = {name: self.rules[group.name] for group in groups for name in group.names}
        check_whole(
            spec.optim,
            [
                name
                for name, rule in self.rule_of.items()
                if rule.matrices is not None and self.holds(name)
            ],
            {name: (box.stacked_shape, box.shape) for name, box in self.boxes.items()},
        )
        self.host_state = host_optimizers(self.rules, spec.device) if spec.state_on_host else None
        self.scaler = Scaler(spec.loss_scale, spec.device) if spec.dtype == torch.float16 else None
        self.skipped = torch.zeros((), dtype=torch.float32, device=spec.device)
        self._one = torch.ones((), dtype=torch.float32, device=spec.device)

    def _objective_box(self, name: str) -> ParamBox:
        """Parameters of the objective are whole on every rank, and every rank computes all of their gradient."""
        spec, tensor = self.specs[name], self.ranks.tensor
        return ParamBox.whole(spec, tensor.size, tensor.rank)

    @abstractmethod
    def shards(self) -> Iterator[ParamShard]:
        """What this rank holds, parameter by parameter, in the same order on every rank."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all parameters are current."""

    @abstractmethod
    def _square_norm(self) -> Tensor:
        """The sum of squares of all gradients of the whole model, the same on every rank."""

    @abstractmethod
    def _step(self, hypers: dict[str, Hyper], guard: Guard) -> None:
        """Update this rank's shards and clear the gradients."""

    @abstractmethod
    def _updates_done(self) -> dict[str, int]:
        """Updates done, by the name of each parameter that trains."""

    @abstractmethod
    def _set_updates_done(self, done: dict[str, int]) -> None: ...

    def holds(self, name: str) -> bool:
        """Whether this rank has any part of a parameter."""
        return name in self.boxes

    def ranks_of(self, name: str) -> RankGroups:
        """The groups that share a parameter: its shards, its replicas, and all whose gradients are summed."""
        return self._expert_ranks if self.boxes[name].expert_ranks > 1 else self.ranks

    def evaluate(self, batches: Iterable[Batch], at: StepInfo) -> MetricSums:
        """Metric sums over all ranks' batches, without gradients or dropout; of averaged weights where the optimizer averages."""
        self.flush()
        with self.with_averages():
            return self.passes.evaluate(batches, at)

    def objective_values(self) -> dict[str, Tensor]:
        """The objective's own parameters, which are whole on every rank."""
        self.flush()
        with self.with_averages():
            return {
                name: parameter_at(home).detach().clone()
                for name, home in self.homes.items()
                if "objective" in self.specs[name].groups
            }

    @contextmanager
    def with_averages(self) -> Iterator[None]:
        """The model computes with averaged weights inside, and with those that train afterwards; nothing changes for other optimizers."""
        if not any(rule.averages for rule in self.rules.values()):
            yield
            return
        self._show(averages=True)
        try:
            yield
        finally:
            self._show(averages=False)

    @abstractmethod
    def _show(self, *, averages: bool) -> None:
        """Set the compute parameters from the masters: to the averages, or to what trains."""

    @torch.no_grad()
    def update(self, hypers: dict[str, Hyper], skip: Tensor | None = None) -> Update:
        """Clip by the exact global norm and step this rank's shards. A step with a non-finite norm changes nothing."""
        square = self._square_norm()
        scale = self._one if self.scaler is None else self.scaler.scale.clone()
        device = self.spec.device
        skip = None if skip is None else skip.to(device)
        norm, guard, overflow = clip_guard(
            square.sqrt().float().to(device), self.spec.optim.clip, scale, skip
        )
        self._step(hypers, guard)
        self.skipped += guard.found_inf
        if self.passes.expert_load is not None:
            self.model.balance(self.passes.expert_load, 1 - guard.found_inf)
        if self.scaler is not None:
            self.scaler.update(overflow)
        return Update(norm, guard.found_inf, scale)

    def _sum_over_model(self, square: Tensor, of_experts: Tensor | None = None) -> Tensor:
        """Add up a number of every rank that holds another part of the model; that of split experts has other shards."""
        self.ranks.shard.all_reduce(square).wait()
        if of_experts is not None and self.ranks.expert.size > 1:
            for group in (self._expert_ranks.shard, self.ranks.expert):
                group.all_reduce(of_experts).wait()
            square = square + of_experts
        for group in (self.ranks.tensor, self.ranks.pipeline):
            group.all_reduce(square).wait()
        return square

    def _whole_box(self, name: str, value: Tensor) -> Tensor:
        """The whole parameter from this rank's box of it; the ranks of the tensor and expert axes call it together, in the same order."""
        box, expert = self.boxes[name], self.ranks.expert
        part = self._over_tensor(box, value)
        if box.expert_ranks == 1:
            return part
        whole = part.new_empty(box.spec.shape)
        expert.all_gather(whole.view(-1), part.reshape(-1)).wait()
        return whole

    def _over_tensor(self, box: ParamBox, value: Tensor) -> Tensor:
        """The part of this rank's experts, or all of a parameter without experts, from the parts of the tensor axis."""
        tensor, shape = self.ranks.tensor, box.stacked_shape
        if box.dim is None:
            return value
        padded = value.reshape(-1)
        if padded.numel() < box.largest:
            padded = torch.cat([padded, padded.new_zeros(box.largest - padded.numel())])
        found = padded.new_empty(tensor.size, box.largest)
        tensor.all_gather(found.view(-1), padded).wait()
        if box.dim == 0 and box.copies == 1 and len(set(box.sizes)) == 1:
            return found.view(shape)
        parts = []
        for index, size in enumerate(box.sizes):
            part = [size if at == box.dim else length for at, length in enumerate(shape)]
            parts.append(view(found[index * box.copies], 0, tuple(part)))
        return torch.cat(parts, dim=box.dim)

    def _apply(
        self,
        group: str,
        tensors: LocalTensors,
        hyper: Hyper,
        guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:
        """Run a group's rule on some shards, with state on the device or in host memory; `copies` are lower-precision copies to set."""
        if self.host_state is not None:
            self.host_state[group].update(tensors, hyper, guard, copies)
        else:
            self.rules[group].optimizer.update(*tensors, hyper, guard, copies)

    def _apply_whole(
        self, group: str, members: Sequence[WholeParameter], hyper: Hyper, guard: Guard
    ) -> None:
        """Run a group's rule on whole parameters; those with the same slots in one call."""
        calls: dict[tuple[str, ...], list[WholeParameter]] = {}
        for member in members:
            calls.setdefault(tuple(member.state), []).append(member)
        for slots, some in calls.items():
            state = {slot: [member.state[slot] for member in some] for slot in slots}
            tensors = LocalTensors(
                [one.master for one in some],
                [one.gradient for one in some],
                state,
                [one.step for one in some],
            )
            copies = [one.copy for one in some if one.copy is not None]
            self._apply(group, tensors, hyper, guard, copies or None)

    def tensors(self) -> Iterator[StateTensor]:
        """Master weights and optimizer state of what trains, the parameter itself of what does not; replicas share the writing."""
        self.flush()
        for index, shard in enumerate(self.shards()):
            ranks = self.ranks_of(shard.name)
            writes = (
                ranks.reduce.rank == 0
                if shard.is_whole
                else index % ranks.replicate.size == ranks.replicate.rank
            )
            for role, whole in self._roles(shard).items():
                boxes: list[tuple[Ints, Tensor]] = []
                if writes and not self.boxes[shard.name].is_copy:
                    boxes = self._boxes(shard, role)
                yield StateTensor(shard.name, role, whole, boxes)

    def _roles(self, shard: ParamShard) -> dict[str, Ints]:
        """What is saved of a parameter: role -> shape of the whole tensor."""
        shape = self.shapes[shard.name]
        return (
            {"master": shape} | self.rule_of[shard.name].state_shapes(shape)
            if shard.trains
            else {"param": shape}
        )

    def _boxes(self, shard: ParamShard, role: str) -> list[tuple[Ints, Tensor]]:
        """What this rank has of a parameter in one role."""
        if shard.whole_state is not None and role != "master":
            return [
                (self._state_offset(shard.name, held), held)
                for slot, held in shard.whole_state.items()
                if slot == role
            ]
        if not shard.boxes:
            return []
        flat = shard.values
        if role not in ("param", "master"):
            flat = self.rule_of[shard.name].storage.read(
                shard.state, role, shard.state_start, flat.numel()
            )
        return [(box.offset, view(flat, start, box.shape)) for box, start in shard.boxes]

    def _state_offset(self, name: str, held: Tensor) -> Ints:
        """Where the state of a whole parameter begins in that of all experts, which is stacked as the parameter is."""
        box = self.boxes[name]
        return (
            (box.offset[0] if box.expert_ranks > 1 else 0, *[0] * (held.dim() - 1))
            if held.dim()
            else ()
        )

    def scalars(self) -> dict[str, Any]:
        """Updates done, per parameter (groups may change on resume), steps skipped, and the loss scale."""
        scaler = None if self.scaler is None else self.scaler.scalars()
        done = {
            name: count
            for part in self.ranks.pipeline.gather(self._updates_done())
            for name, count in part.items()
        }
        return {"steps": done, "skipped": int(self.skipped), "scaler": scaler}

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """Restore what tensors and scalars returned, saved from any layout."""
        self.flush()
        for shard in self.shards():
            for role in self._roles(shard):
                self._load_role(shard, role, read)
        self._set_updates_done(scalars["steps"])
        self.skipped.fill_(scalars["skipped"])
        if self.scaler is not None and scalars.get("scaler") is not None:
            self.scaler.load(scalars["scaler"])

    def _load_role(self, shard: ParamShard, role: str, read: ReadTensor) -> None:
        if shard.whole_state is not None and role != "master":
            for slot, held in shard.whole_state.items():
                if slot == role:
                    held.copy_(
                        read(
                            shard.name,
                            role,
                            self._state_offset(shard.name, held),
                            tuple(held.shape),
                        )
                    )
            return
        parts = [
            read(shard.name, role, box.offset, box.shape).reshape(-1) for box, _ in shard.boxes
        ]
        if not parts:
            return
        values = parts[0] if len(parts) == 1 else torch.cat(parts)
        if role in ("param", "master"):
            shard.values.copy_(values)
        else:
            self.rule_of[shard.name].storage.write(shard.state, role, shard.state_start, values)


def host_optimizers(
    rules: dict[str, UpdateRule], device: torch.device
) -> dict[str, HostStateOptimizer]:
    """What runs each group's rule on state in host memory; groups with one rule share it and its buffers on the device."""
    made = {id(rule): HostStateOptimizer(rule.optimizer, device) for rule in rules.values()}
    return {group: made[id(rule)] for group, rule in rules.items()}


def view(flat: Tensor, start: int, shape: Ints) -> Tensor:
    """The tensor of a shape that begins at `start` of a flat one."""
    return flat[start : start + torch.Size(shape).numel()].view(shape)


def needs_gradient(_block: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook before the first block: backward reaches it whatever gates were drawn. Ranks whose gates differ then exchange the same."""
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_()


def parameter_homes(model: nn.Module, objective: Task) -> dict[str, tuple[nn.Module, str]]:
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


def square_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares as one fp64 number, the same however the elements are split over ranks and buckets."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64)
    if filled[0].device.type == "cpu":
        return torch.stack(
            [square for tensor in filled for square in _block_squares(tensor.reshape(-1))]
        ).sum()
    return (
        wide(torch.stack(list(torch._foreach_norm(filled, 2, dtype=torch.float32)))).square().sum()
    )


def beside(square: Tensor, device: torch.device) -> Tensor:
    """A sum of squares on the device, where it has float64."""
    return square if device.type == "mps" else square.to(device)


def _block_squares(flat: Tensor) -> list[Tensor]:
    whole = flat.numel() // NORM_BLOCK * NORM_BLOCK
    parts = [flat[:whole].view(-1, NORM_BLOCK)] if whole else []
    if whole < flat.numel():
        parts.append(flat[None, whole:])
    return [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double().square().sum()
        for part in parts
    ]


def clip_guard(
    scaled_norm: Tensor, clip: float | None, loss_scale: Tensor, skip: Tensor | None = None
) -> tuple[Tensor, Guard, Tensor]:
    """(norm, guard, overflow) from the global norm of gradients that still carry the loss scale.

    A norm that is not finite skips the step, and so does `skip` where it is 1; only the first is an overflow.
    """
    norm = scaled_norm / loss_scale
    overflow = norm.isfinite().logical_not().float()
    found_inf = overflow if skip is None else overflow.maximum(skip)
    divisor = loss_scale if clip is None else loss_scale * ((norm + 1e-6) / clip).clamp(min=1.0)
    return norm, Guard(divisor.nan_to_num(1.0, 1.0, 1.0), found_inf), overflow

"""What both engines share: clipping, skipped steps, the loss scale, saving and loading of shards.

    whole parameter --tensor, expert axis--> ParamBox --shard group--> ParamShard
                                             what the model holds      what this rank updates

A rank's model holds a box of every parameter (all of it, unless the tensor or expert axis splits
it). An engine shards that box and says which elements of the whole parameter it holds, as
`ParamShard`. Norms count each element of the whole model once, checkpoints save it once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
from headway.parallel.microbatch_runner import MicrobatchRunner
from headway.parallel.update_rules import (
    LocalTensors,
    UpdateRule,
    WholeParameter,
    WholeState,
    build_rules,
    check_whole,
)
from headway.runtime.device import to_float64
from headway.tasks.base import MetricSums, StepInfo, Task, first_passes_of

if TYPE_CHECKING:
    from headway.kernels.policy_scores import DrawnFrom
    from headway.parallel.offload_optimizer import HostStateOptimizer
    from headway.parallel.pipeline.stages import PipelinePart

NORM_BLOCK = 1024
"""Elements whose squares are added up in fp32 on the CPU. One fp32 sum over 50 million elements is
0.8 % too small; this is as fast."""
CLIP_EPSILON = 1e-6
"""Added to the norm before it is compared with the limit, as `torch.nn.utils.clip_grad_norm_`
does."""


@dataclass(frozen=True)
class LocalModel:
    """The part of a model that this rank holds."""

    boxes: dict[str, ParamBox]
    """Of every parameter of this rank's model, by name."""
    sums: dict[int, RankGroup] = field(default_factory=dict)
    """Ranks of the tensor axis that add up their partial gradients, by how many hold the same."""
    specs: dict[str, ParamSpec] = field(default_factory=dict)
    """Every parameter of the whole model and of the objective, in order."""
    part: PipelinePart | None = None
    """This rank's stages, where there is a pipeline."""


@dataclass(frozen=True)
class ParamShard:
    """What this rank holds of one parameter.

    Boxes of the whole tensor, stored one after another in flat tensors.
    """

    name: str
    boxes: list[tuple[Box, int]]
    """Of the whole parameter, each with its start in `values`; empty: this rank holds nothing of
    it."""
    values: Tensor
    """Flat: the fp32 master weights, or the parameter itself if it does not train."""
    trains: bool
    state: dict[str, Tensor]
    """The optimizer's tensors in the form of its storage; this parameter begins at
    `state_start`."""
    state_start: int = 0
    is_whole: bool = False
    """Every rank of the shard group holds the same."""
    whole_state: WholeState | None = None
    """State of an optimizer of whole parameters: on the rank that updates this one, else empty.
    None: state is in `state`."""


class BaseEngine(ABC):
    """Holds the model, its parameter shards and optimizer state.

    Implements parallel.engine.Engine together with a subclass.
    """

    def __init__(
        self,
        model: Model,
        objective: Task,
        groups: Sequence[ParamGroup],
        spec: EngineSpec,
        local: LocalModel,
    ) -> None:
        self.model = model
        self.spec = spec
        self.ranks = spec.ranks
        self.groups = list(groups)
        self.local = local
        part = local.part

        if part is None:
            self.runner = MicrobatchRunner(model, objective, spec)
        else:
            from headway.parallel.pipeline.microbatch_runner import PipelineRunner

            self.runner = PipelineRunner(model, objective, spec, part)

        # `specs` and `shapes` know the whole model, `param_owners` and `boxes` this rank's part.
        self.specs = local.specs
        self.shapes = {name: param_spec.shape for name, param_spec in self.specs.items()}
        self.param_owners = parameter_owners(model, objective)
        self._expert_ranks = spec.ranks.of_experts()
        self.boxes = {
            name: local.boxes[name] if name in local.boxes else self._objective_box(name)
            for name in self.param_owners
        }
        # What several stages hold (gates, a tied embedding) is counted and saved by the first.
        if part is not None:
            self.boxes = {
                name: replace(box, of_earlier_stage=part.is_copy(name))
                for name, box in self.boxes.items()
            }

        self.rules = build_rules(spec.optim, groups)
        """The update rule of every group."""
        self.rule_of = {name: self.rules[group.name] for group in groups for name in group.names}
        updated_whole = [
            name
            for name, rule in self.rule_of.items()
            if rule.matrices is not None and self.holds(name)
        ]
        # Ranks of the expert axis hold whole matrices of some experts, which is whole enough.
        shapes = {name: (box.stacked_shape, box.shape) for name, box in self.boxes.items()}
        check_whole(spec.optim, updated_whole, shapes)

        self.host_state = None
        if spec.state_on_host:
            self.host_state = host_optimizers(self.rules, spec.device)

        # fp16 alone needs it: bf16 has the exponents of fp32, so small gradients do not vanish.
        self.scaler = None
        if spec.dtype == torch.float16:
            self.scaler = Scaler(spec.loss_scale, spec.device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=spec.device)
        # The loss scale of other precisions, on the device: no step copies a number to it.
        self._one = torch.ones((), dtype=torch.float32, device=spec.device)

    def _objective_box(self, name: str) -> ParamBox:
        """The box of a parameter of the objective: all of it, the same on every tensor rank.

        Every rank computes all of its gradient, so nothing is summed over the tensor axis.
        """
        tensor = self.ranks.tensor
        return ParamBox.whole(self.specs[name], tensor.size, tensor.rank)

    @abstractmethod
    def shards(self) -> Iterator[ParamShard]:
        """What this rank holds, parameter by parameter, in the same order on every rank.

        A parameter of which this rank holds nothing has a shard without boxes: `tensors` divides
        the writing by position, which must mean the same parameter everywhere.
        """

    @abstractmethod
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Set parameters by name; returns the names that were not given."""

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
        """The groups of ranks that share a parameter: those of all parameters, or of experts."""
        if self.boxes[name].expert_ranks > 1:
            return self._expert_ranks
        return self.ranks

    @property
    def is_validated_as_a_whole(self) -> bool:
        """Whether a validation of the objective compares all of its rows with each other."""
        passes = first_passes_of(self.runner.objective)
        return any(first_pass.in_evaluation for first_pass in passes)

    def evaluate(self, batches: Iterable[Batch], step_info: StepInfo) -> MetricSums:
        """Metric sums over all ranks' batches, without gradients or dropout.

        An optimizer that averages weights is judged by its averages.
        """
        self.flush()
        with self.with_averages():
            return self.runner.evaluate(batches, step_info)

    def token_log_probs(
        self, batches: Iterable[Batch], step_info: StepInfo, drawn: DrawnFrom
    ) -> list[Tensor]:
        """The log-probability of every target of this rank's microbatches, [B,T] each, with the
        weights that train."""
        self.flush()
        return self.runner.token_log_probs(batches, step_info, drawn)

    def objective_values(self) -> dict[str, Tensor]:
        """The objective's own parameters, which are whole on every rank."""
        self.flush()
        with self.with_averages():
            return {
                name: parameter_at(owner).detach().clone()
                for name, owner in self.param_owners.items()
                if "objective" in self.specs[name].groups
            }

    @contextmanager
    def with_averages(self) -> Iterator[None]:
        """Inside, the model computes with averaged weights; afterwards with those that train again.

        Does nothing for optimizers that do not average.
        """
        if not any(rule.averages for rule in self.rules.values()):
            yield
            return
        self._set_compute_params(averages=True)
        try:
            yield
        finally:
            self._set_compute_params(averages=False)

    @abstractmethod
    def _set_compute_params(self, *, averages: bool) -> None:
        """Set the compute parameters from the masters: to the averages, or to what trains."""

    @torch.no_grad()
    def update(self, hypers: dict[str, Hyper], skip: Tensor | None = None) -> Update:
        """Clip by the exact global norm and step this rank's shards.

        A step with a non-finite norm changes nothing.
        """
        device = self.spec.device
        norm_of_scaled = self._square_norm().sqrt().float().to(device)

        # A copy: the scaler changes its tensor in place below, the result reports this step's.
        scale = self._one
        if self.scaler is not None:
            scale = self.scaler.scale.clone()
        if skip is not None:
            skip = skip.to(device)
        norm, guard, overflow = clip_guard(norm_of_scaled, self.spec.optim.clip, scale, skip)

        self._step(hypers, guard)
        self.skipped += guard.found_inf

        # The bias of routers is no parameter of the optimizer, but follows it: a skipped step must
        # not move it either.
        if self.runner.expert_load is not None:
            self.model.balance(self.runner.expert_load, 1 - guard.found_inf)
        self._hold_gates()
        # A step that the loss monitor skipped says nothing about the range of fp16.
        if self.scaler is not None:
            self.scaler.update(overflow)
        return Update(norm, guard.found_inf, scale)

    def _hold_gates(self) -> None:
        """Shift head gates to the sparsity of the next step, for a task that holds them at one.

        Now and not before the next step, so that what is validated and saved is at its target, too.
        """
        gates = self.spec.objective.needs.gates
        if gates is None or gates.held_at is None:
            return
        step_info = self.runner.last_step
        assert step_info is not None, "an update follows a backward"

        # The parameter may still be on its way from the ranks that updated it.
        self.flush()
        target = gates.held_at(step_info.step + 1, step_info.total_steps)
        # Every rank has all gates and finds the same shift.
        self.fill(self.model.held_gates(target).items())

    def _sum_over_model(self, square: Tensor, experts_square: Tensor | None = None) -> Tensor:
        """Add up the sums of squares of all ranks that hold different parts of the model.

        Split experts have their own sum, because other ranks share their shards.
        """
        self.ranks.shard.all_reduce(square).wait()
        if experts_square is not None and self.ranks.expert.size > 1:
            for group in (self._expert_ranks.shard, self.ranks.expert):
                group.all_reduce(experts_square).wait()
            square = square + experts_square

        # Not over `replicate`: its ranks hold the same shards, whose gradients are summed already.
        for group in (self.ranks.tensor, self.ranks.pipeline):
            group.all_reduce(square).wait()
        return square

    def _gather_whole(self, name: str, value: Tensor) -> Tensor:
        """The whole parameter from this rank's box of it.

        The ranks of the tensor and expert axes call it together, in the same order.
        """
        box = self.boxes[name]
        part = self._gather_tensor_parts(box, value)
        if box.expert_ranks == 1:
            return part
        whole = part.new_empty(box.spec.shape)
        self.ranks.expert.all_gather(whole.view(-1), part.reshape(-1)).wait()
        return whole

    def _gather_tensor_parts(self, box: ParamBox, value: Tensor) -> Tensor:
        """Put a parameter together from the parts of the tensor axis.

        Of stacked experts the result has those of this rank of the expert axis.
        """
        if box.dim is None:
            return value
        tensor = self.ranks.tensor
        shape = box.stacked_shape

        # An all-gather needs parts of one length; those of a vocabulary may differ by a row.
        padded = value.reshape(-1)
        if padded.numel() < box.largest:
            padded = torch.cat([padded, padded.new_zeros(box.largest - padded.numel())])
        gathered = padded.new_empty(tensor.size, box.largest)
        tensor.all_gather(gathered.view(-1), padded).wait()

        # Equal parts along dim 0 already lie in the order of the whole: nothing to copy.
        if box.dim == 0 and box.copies == 1 and len(set(box.sizes)) == 1:
            return gathered.view(shape)
        parts = []
        for index, size in enumerate(box.sizes):
            part_shape = list(shape)
            part_shape[box.dim] = size
            # Of neighbouring ranks with the same part (KV heads), the first is read.
            parts.append(view(gathered[index * box.copies], 0, tuple(part_shape)))
        return torch.cat(parts, dim=box.dim)

    def _apply(
        self,
        group: str,
        tensors: LocalTensors,
        hyper: Hyper,
        guard: Guard,
        copies: list[Tensor] | None = None,
    ) -> None:
        """Run a group's rule on some shards, with state on the device or in host memory.

        `copies` are lower-precision copies to set.
        """
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
        for slots, batch in calls.items():
            tensors = LocalTensors(
                [member.master for member in batch],
                [member.gradient for member in batch],
                {slot: [member.state[slot] for member in batch] for slot in slots},
                [member.step for member in batch],
            )
            copies = [member.copy for member in batch if member.copy is not None]
            self._apply(group, tensors, hyper, guard, copies or None)

    def tensors(self) -> Iterator[StateTensor]:
        """Master weights and optimizer state of what trains, the parameter itself of what does not.

        Replicas share the writing.
        """
        self.flush()
        for index, shard in enumerate(self.shards()):
            ranks = self.ranks_of(shard.name)
            # Replicas hold the same shard; they take turns, so that each writes about as much.
            if shard.is_whole:
                writes = ranks.reduce.rank == 0
            else:
                writes = index % ranks.replicate.size == ranks.replicate.rank
            for role, shape in self._saved_shapes(shard).items():
                boxes: list[tuple[Ints, Tensor]] = []
                if writes and not self.boxes[shard.name].is_copy:
                    boxes = self._saved_boxes(shard, role)
                yield StateTensor(shard.name, role, shape, boxes)

    def _saved_shapes(self, shard: ParamShard) -> dict[str, Ints]:
        """The tensors that a checkpoint has of a parameter: role -> shape of the whole tensor."""
        shape = self.shapes[shard.name]
        if shard.trains:
            return {"master": shape} | self.rule_of[shard.name].state_shapes(shape)
        return {"param": shape}

    def _saved_boxes(self, shard: ParamShard, role: str) -> list[tuple[Ints, Tensor]]:
        """This rank's boxes of one such tensor: (offset in the whole tensor, values)."""
        if shard.whole_state is not None and role != "master":
            state = shard.whole_state.get(role)
            if state is None:
                return []  # another rank updates this parameter and has its state
            return [(self._state_offset(shard.name, state), state)]
        if not shard.boxes:
            return []
        # Masters and frozen parameters are plain; state may be stored in 8 bits.
        flat = shard.values
        if role not in ("param", "master"):
            flat = self.rule_of[shard.name].storage.read(
                shard.state, role, shard.state_start, flat.numel()
            )
        return [(box.offset, view(flat, start, box.shape)) for box, start in shard.boxes]

    def _state_offset(self, name: str, state: Tensor) -> Ints:
        """Where the state of a whole parameter begins in the saved tensor.

        That tensor has the state of all experts, stacked as the parameter is.
        """
        if state.dim() == 0:
            return ()
        box = self.boxes[name]
        offset = [0] * state.dim()
        if box.expert_ranks > 1:
            offset[0] = box.offset[0]
        return tuple(offset)

    def scalars(self) -> dict[str, Any]:
        """Updates done per parameter, steps skipped, and the loss scale.

        The counts are per parameter, not per group: a resumed run may group them otherwise.
        """
        scaler = None
        if self.scaler is not None:
            scaler = self.scaler.scalars()
        done: dict[str, int] = {}
        for stage_counts in self.ranks.pipeline.gather(self._updates_done()):
            done |= stage_counts
        return {"steps": done, "skipped": int(self.skipped), "scaler": scaler}

    @torch.no_grad()
    def load(self, read: ReadTensor, scalars: dict[str, Any]) -> None:
        """Restore what tensors and scalars returned, saved from any layout."""
        self.flush()
        for shard in self.shards():
            for role in self._saved_shapes(shard):
                self._load_role(shard, role, read)
        self._set_updates_done(scalars["steps"])
        self.skipped.fill_(scalars["skipped"])
        if self.scaler is not None and scalars.get("scaler") is not None:
            self.scaler.load(scalars["scaler"])

    def _load_role(self, shard: ParamShard, role: str, read: ReadTensor) -> None:
        if shard.whole_state is not None and role != "master":
            state = shard.whole_state.get(role)
            if state is not None:
                offset = self._state_offset(shard.name, state)
                state.copy_(read(shard.name, role, offset, tuple(state.shape)))
            return

        parts = [
            read(shard.name, role, box.offset, box.shape).reshape(-1) for box, _ in shard.boxes
        ]
        if not parts:
            return
        values = parts[0]  # the usual case, without a copy
        if len(parts) > 1:
            values = torch.cat(parts)

        if role in ("param", "master"):
            shard.values.copy_(values)
        else:
            self.rule_of[shard.name].storage.write(shard.state, role, shard.state_start, values)


def host_optimizers(
    rules: dict[str, UpdateRule], device: torch.device
) -> dict[str, HostStateOptimizer]:
    """What runs each group's rule on state in host memory.

    Groups with one rule share it and its buffers on the device.
    """
    from headway.parallel.offload_optimizer import HostStateOptimizer

    optimizers = {id(rule): HostStateOptimizer(rule.optimizer, device) for rule in rules.values()}
    return {group: optimizers[id(rule)] for group, rule in rules.items()}


def view(flat: Tensor, start: int, shape: Ints) -> Tensor:
    """The tensor of a shape that begins at `start` of a flat one."""
    return flat[start : start + torch.Size(shape).numel()].view(shape)


def needs_gradient(_block: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A forward pre-hook of the first block: its input needs a gradient, so backward reaches it.

    Where little else trains, a rank whose gates are all closed would end its backward early, while
    ranks with other gates wait for its part of the exchanges inside the layers.
    """
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_()


def parameter_owners(model: nn.Module, objective: Task) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter is registered: name -> (module, attribute), in order of the model."""
    owners: dict[str, tuple[nn.Module, str]] = {}
    roots: list[tuple[str, nn.Module]] = [("", model)]
    if objective.module is not None:
        roots.append((OBJECTIVE, objective.module))
    for prefix, root in roots:
        for path, module in root.named_modules():
            if path:
                path += "."
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    owners[f"{prefix}{path}{leaf}"] = (module, leaf)
    return owners


def parameter_at(owner: tuple[nn.Module, str]) -> nn.Parameter:
    """The parameter that is registered in a module under an attribute."""
    module, leaf = owner
    parameter = module._parameters[leaf]
    assert parameter is not None
    return parameter


def square_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares as one fp64 number.

    It is the same however the elements are split over ranks and buckets.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64)
    if filled[0].device.type == "cpu":
        squares: list[Tensor] = []
        for tensor in filled:
            squares += _block_squares(tensor.reshape(-1))
        return torch.stack(squares).sum()
    # Other devices add up in a tree, which needs no blocks; one launch for all tensors.
    norms = torch._foreach_norm(filled, 2, dtype=torch.float32)
    return to_float64(torch.stack(list(norms))).square().sum()


def on_device(square: Tensor, device: torch.device) -> Tensor:
    """A sum of squares on the device, where it has float64."""
    if device.type == "mps":
        return square
    return square.to(device)


def _block_squares(flat: Tensor) -> list[Tensor]:
    """Sums of squares in fp64 of the whole blocks of a tensor and of what remains after them."""
    in_blocks = flat.numel() // NORM_BLOCK * NORM_BLOCK
    parts: list[Tensor] = []
    if in_blocks:
        parts.append(flat[:in_blocks].view(-1, NORM_BLOCK))
    if in_blocks < flat.numel():
        parts.append(flat[None, in_blocks:])
    return [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double().square().sum()
        for part in parts
    ]


def clip_guard(
    scaled_norm: Tensor, clip: float | None, loss_scale: Tensor, skip: Tensor | None = None
) -> tuple[Tensor, Guard, Tensor]:
    """(norm, guard, overflow) from the global norm of gradients that still carry the loss scale.

    A norm that is not finite skips the step, and so does `skip` where it is 1; only the first is an
    overflow.
    """
    norm = scaled_norm / loss_scale
    overflow = norm.isfinite().logical_not().float()
    found_inf = overflow
    if skip is not None:
        found_inf = overflow.maximum(skip)

    # One divisor undoes the loss scale and clips: gradients are read once.
    divisor = loss_scale
    if clip is not None:
        divisor = loss_scale * ((norm + CLIP_EPSILON) / clip).clamp(min=1.0)
    # The rule still computes in a skipped step and drops the result; it must not divide by nan.
    return norm, Guard(divisor.nan_to_num(1.0, 1.0, 1.0), found_inf), overflow

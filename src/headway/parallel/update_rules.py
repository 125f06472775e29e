"""Which update rule changes each parameter.

In: the groups and what this rank's model holds of each parameter; out: a rule by group.

An elementwise rule (AdamW) takes flat tensors cut anywhere, so that state is sharded evenly. A
`MatrixOptimizer` (Muon) takes whole parameters. Both engines give each of them to one rank of the
shard group, which alone has its state:

    flat engine   a bucket is laid out so that no parameter crosses the border of two shards
                  (`assign`); nothing else is exchanged
    FSDP          gradients and masters of the parameters of one shape travel to their owners and
                  the new masters back (fsdp_matrices.py)

State in other shapes than the parameter's (factored moments) is saved as whole tensors in those
shapes.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from headway.errors import ParallelError
from headway.optim.base import AveragingOptimizer, MatrixOptimizer, OptimConfig, Optimizer
from headway.optim.groups import ParamGroup
from headway.optim.state_storage import BLOCK, StateStorage, storage_of

Ints = tuple[int, ...]
BLOCKED_BYTES = 1 + 4 / BLOCK
"""Bytes of an element of 8-bit state: its code, and its part of the block's fp32 scale."""
WholeState = dict[str, Tensor]
"""The state of one parameter under a MatrixOptimizer, by slot, each in its own shape."""


class LocalTensors(NamedTuple):
    """What an update works on, as lists with an element for each tensor; all flat."""

    params: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]


class WholeParameter(NamedTuple):
    """One whole parameter that this rank updates."""

    master: Tensor
    gradient: Tensor
    state: WholeState
    step: Tensor
    """Counter of updates; the rule adds to it."""
    copy: Tensor | None = None
    """The lower-precision copy the model computes with."""


@dataclass(frozen=True)
class UpdateRule:
    """One rule of the run's optimizer, and how its state is stored."""

    optimizer: Optimizer
    storage: StateStorage

    @property
    def matrices(self) -> MatrixOptimizer | None:
        """The rule, if it needs whole parameters."""
        if isinstance(self.optimizer, MatrixOptimizer):
            return self.optimizer
        return None

    @property
    def averages(self) -> AveragingOptimizer | None:
        """The rule, if the model trains with other weights than those that are kept."""
        if isinstance(self.optimizer, AveragingOptimizer):
            return self.optimizer
        return None

    def state_shapes(self, shape: Ints) -> dict[str, Ints]:
        """The shape of each state tensor of a parameter, as a checkpoint holds it."""
        if self.matrices is not None:
            return self.matrices.state_shapes(shape)
        return dict.fromkeys(self.optimizer.slots, shape)

    def allocate_whole(self, shape: Ints, device: torch.device) -> WholeState:
        """State for one whole parameter, all zero."""
        assert not self.storage.is_blocked, "state of whole parameters is fp32 or bf16"
        return {
            slot: torch.zeros(size, dtype=self.storage.dtype, device=device)
            for slot, size in self.state_shapes(shape).items()
        }


def build_rules(config: OptimConfig, groups: Sequence[ParamGroup]) -> dict[str, UpdateRule]:
    """The rule of every group, by the group's name; groups of one part share it."""
    # One object per part: groups that share a rule also share its staging buffers in host offload.
    parts: dict[str, UpdateRule] = {}
    for part in dict.fromkeys(group.part for group in groups):
        optimizer = config.part(part).build()
        parts[part] = UpdateRule(optimizer, storage_of(optimizer))
    return {group.name: parts[group.part] for group in groups}


def check_whole(
    config: OptimConfig, names: Sequence[str], shapes: Mapping[str, tuple[Ints, Ints]]
) -> None:
    """Refuse a rule of whole parameters where this rank's model holds a part of one.

    `shapes` has (whole, local) by name.
    """
    for name in names:
        whole, local = shapes[name]
        if whole != local:
            raise ParallelError(
                f"optim.kind is {config.kind!r}, which updates whole matrices; the tensor axis "
                f"splits {name} ({list(local)} of {list(whole)} here). Use parallel.tensor=1, or "
                "another optimizer such as adamw."
            )


def state_bytes(
    config: OptimConfig, groups: Sequence[ParamGroup], shapes: Mapping[str, Ints]
) -> float:
    """Bytes of optimizer state per trained parameter, before any sharding."""
    rules = build_rules(config, groups)
    total_bytes = 0.0
    elements = 0.0
    for group in groups:
        rule = rules[group.name]
        element_bytes = float(rule.storage.dtype.itemsize)
        if rule.storage.is_blocked:
            element_bytes = BLOCKED_BYTES
        for name in group.names:
            # Groups also have the objective's parameters, which callers leave out of `shapes`.
            shape = shapes.get(name)
            if shape is not None:
                elements += prod(shape)
                state_elements = sum(prod(size) for size in rule.state_shapes(shape).values())
                total_bytes += element_bytes * state_elements
    if elements == 0:
        return 0.0
    return total_bytes / elements


def assign(sizes: Sequence[int], owners: int) -> tuple[list[int], int]:
    """Give things to owners, the largest first and each to the one with least so far.

    Returns the owner of each and the largest load.
    """
    # A heap of (load, owner): ties go to the lowest owner, so all ranks compute the same.
    loads = [(0, owner) for owner in range(owners)]
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owner = heapq.heappop(loads)
        chosen[index] = owner
        heapq.heappush(loads, (load + sizes[index], owner))
    return chosen, max(load for load, _ in loads)

"""Which update rule changes each parameter. In: the groups and what this rank's model holds of each parameter; out: a rule by group.

An elementwise rule (AdamW) takes flat tensors cut anywhere, so that state is sharded evenly. A `MatrixOptimizer` (Muon) takes whole
parameters. Both engines give each of them to one rank of the shard group, which alone has its state:

    flat engine   a bucket is laid out so that no parameter crosses the border of two shards (`assign`); nothing else is exchanged
    FSDP          gradients and masters of the parameters of one shape travel to their owners and the new masters back (fsdp_matrices.py)

State in other shapes than the parameter's (factored moments) is saved as whole tensors in those shapes.
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
from headway.optim.state_storage import StateStorage, storage_of

Ints = tuple[int, ...]
WholeState = dict[str, Tensor]
"""The state of one parameter under a MatrixOptimizer, by slot, each in its own shape."""


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
        return self.optimizer if isinstance(self.optimizer, MatrixOptimizer) else None

    @property
    def averages(self) -> AveragingOptimizer | None:
        """The rule, if the model trains with other weights than those that are kept."""
        return self.optimizer if isinstance(self.optimizer, AveragingOptimizer) else None

    def state_shapes(self, shape: Ints) -> dict[str, Ints]:
        """The shape of each state tensor of a parameter, as a checkpoint holds it."""
        found = self.matrices
        return (
            dict.fromkeys(self.optimizer.slots, shape)
            if found is None
            else found.state_shapes(shape)
        )

    def allocate_whole(self, shape: Ints, device: torch.device) -> WholeState:
        """State for one whole parameter, all zero."""
        assert not self.storage.is_blocked, "state of whole parameters is fp32 or bf16"
        return {
            slot: torch.zeros(size, dtype=self.storage.dtype, device=device)
            for slot, size in self.state_shapes(shape).items()
        }


def build_rules(config: OptimConfig, groups: Sequence[ParamGroup]) -> dict[str, UpdateRule]:
    """The rule of every group, by the group's name; groups of one part share it."""
    parts: dict[str, UpdateRule] = {}
    for part in dict.fromkeys(group.part for group in groups):
        optimizer = config.part(part).build()
        parts[part] = UpdateRule(optimizer, storage_of(optimizer))
    return {group.name: parts[group.part] for group in groups}


def check_whole(
    config: OptimConfig, names: Sequence[str], shapes: Mapping[str, tuple[Ints, Ints]]
) -> None:
    """Refuse a rule of whole parameters where this rank's model holds a part of one; `shapes` has (whole, local) by name."""
    for name in names:
        whole, local = shapes[name]
        if whole != local:
            raise ParallelError(
                f"optim.kind is {config.kind!r}, which updates whole matrices; the tensor axis splits {name} "
                f"({list(local)} of {list(whole)} here). Use parallel.tensor=1, or another optimizer such as adamw."
            )


def state_bytes(
    config: OptimConfig, groups: Sequence[ParamGroup], shapes: Mapping[str, Ints]
) -> float:
    """Bytes of optimizer state per trained parameter, before any sharding."""
    rules = build_rules(config, groups)
    total = elements = 0.0
    for group in groups:
        rule = rules[group.name]
        width = 1.0625 if rule.storage.is_blocked else rule.storage.dtype.itemsize
        for name in group.names:
            shape = shapes.get(name)
            if shape is not None:
                elements += prod(shape)
                total += width * sum(prod(size) for size in rule.state_shapes(shape).values())
    return total / elements if elements else 0.0


def assign(sizes: Sequence[int], owners: int) -> tuple[list[int], int]:
    """Give things to owners, the largest first and each to the one with least so far; returns the owner of each and the largest load."""
    loads = [(0, owner) for owner in range(owners)]
    chosen = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        load, owner = heapq.heappop(loads)
        chosen[index] = owner
        heapq.heappush(loads, (load + sizes[index], owner))
    return chosen, max(load for load, _ in loads)

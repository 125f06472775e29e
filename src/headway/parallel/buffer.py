"""Flat buffers: the parameters of one group and dtype lie in one tensor, in backward order; every parameter and gradient is a view.

buffer   [ norm.weight | layers.3.mlp.down | ... | embed_tokens | pad ]      starts aligned to ALIGN elements
param    compute dtype, what the model reads
master   fp32, what the optimizer changes (the same tensor as param when that is fp32)
grad     fp32, where the gradients of all microbatches are added up
state    the optimizer's slots, fp32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.optim.groups import Group

ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor."""
        return flat[self.start : self.start + self.size].view(self.shape)


def lay_out(names: Sequence[str], shapes: dict[str, tuple[int, ...]]) -> tuple[list[Slot], int]:
    """Place parameters one after another, each start aligned; returns the slots and the padded length."""
    slots: list[Slot] = []
    end = 0
    for name in names:
        slot = Slot(name, shapes[name], end)
        slots.append(slot)
        end += -(-slot.size // ALIGN) * ALIGN
    return slots, end


@dataclass
class TrainBuffer:
    """The trainable parameters of one group."""

    group: Group
    slots: list[Slot]
    param: Tensor
    master: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    steps: Tensor
    """0-dim fp32: updates that were really done."""

    @classmethod
    def allocate(
        cls, group: Group, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, slots: Sequence[str]
    ) -> TrainBuffer:
        """Make the tensors of one group, all zero. Parameters are laid out last first, the order in which backward finishes them."""
        placed, length = lay_out(tuple(reversed(group.names)), shapes)
        master = torch.zeros(length, dtype=torch.float32, device=device)
        param = master if dtype == torch.float32 else torch.zeros(length, dtype=dtype, device=device)
        return cls(
            group, placed, param, master, torch.zeros_like(master),
            {slot: torch.zeros_like(master) for slot in slots}, torch.zeros((), dtype=torch.float32, device=device),
        )  # fmt: skip

    def refresh(self) -> None:
        """Derive the compute parameters from the master weights."""
        if self.param is not self.master:
            self.param.copy_(self.master)


@dataclass
class FrozenBuffer:
    """Parameters that do not train: no master, no gradient, no state."""

    slots: list[Slot]
    param: Tensor = field(repr=False)

    @classmethod
    def allocate(cls, names: Sequence[str], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> FrozenBuffer:
        """Make the tensor, all zero."""
        placed, length = lay_out(names, shapes)
        return cls(placed, torch.zeros(length, dtype=dtype, device=device))

"""Which elements of a parameter this rank's model holds: all of them, or a part where the tensor or expert axis splits it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Ints = tuple[int, ...]


@dataclass(frozen=True)
class ParamBox:
    """The part of one parameter that this rank's model holds: `local_shape` elements from `offset` on."""

    shape: Ints
    """Of the whole parameter."""
    offset: Ints
    local_shape: Ints
    copies: int = 1
    """Neighbouring ranks of the tensor axis that hold the same elements."""
    copy: int = 0
    """This rank's place among them."""
    is_partial: bool = False
    """This rank's gradient is a part: those of the ranks with the same elements are added up."""
    dim: int | None = None
    """Along which it is split; None: all of it is here."""
    sizes: Ints = ()
    """Of all parts along `dim`."""
    expert_ranks: int = 1
    """Ranks of the expert axis that have equal parts of dim 0, each its own experts; 1: not split among them."""
    of_earlier_stage: bool = False
    """An earlier rank of the pipeline holds the same elements."""

    @property
    def is_copy(self) -> bool:
        """Another rank of the tensor or pipeline axis holds the same elements, counts them in norms and saves them."""
        return self.copy > 0 or self.of_earlier_stage

    @property
    def largest(self) -> int:
        """Elements of the largest part on any rank."""
        local = torch.Size(self.local_shape).numel()
        return local if self.dim is None else local // self.local_shape[self.dim] * max(self.sizes)

    @property
    def stacked_shape(self) -> Ints:
        """Of the whole parameter as far as it belongs to this rank's experts: what the tensor axis splits."""
        return (
            self.shape
            if self.expert_ranks == 1
            else (self.shape[0] // self.expert_ranks, *self.shape[1:])
        )

    @classmethod
    def whole(cls, shape: Ints) -> ParamBox:
        """All of a parameter."""
        return cls(shape, (0,) * len(shape), shape)

    def of(self, value: Tensor) -> Tensor:
        """This box of a whole tensor."""
        return value[
            tuple(
                slice(start, start + size)
                for start, size in zip(self.offset, self.local_shape, strict=True)
            )
        ]

    def shift(self, offset: Ints) -> Ints:
        """An offset in this box as an offset in the whole parameter."""
        return tuple(start + at for start, at in zip(self.offset, offset, strict=True))

"""Boxes: axis-aligned parts of a logical tensor, as plain integers.

A 0-dim tensor is one box without dims.

    ParamSpec     a parameter of the whole model (model/layout.py)
    ParamBox      the part of it that this rank's model holds, and who holds the same
    StateTensor   what this rank saves of it in one role, box by box
    StoredBox     a box in a file, with its checksum (checkpoint/manifest.py)

Imports without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from headway.model.layout import ParamSpec

if TYPE_CHECKING:
    from torch import Tensor

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """The elements `offset[d] <= i[d] < offset[d] + shape[d]` of a tensor."""

    offset: Ints
    shape: Ints

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def end(self, dim: int) -> int:
        return self.offset[dim] + self.shape[dim]

    def slices(self, origin: Ints) -> tuple[slice, ...]:
        """The slices of this box in a tensor whose first element is at `origin`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.offset, self.shape, origin, strict=True)
        )

    def of(self, whole: Tensor) -> Tensor:
        """This box of a whole tensor."""
        return whole[self.slices((0,) * len(self.offset))]

    def part(self, inner: Box) -> Box:
        """A box of what this box holds, as a box of the whole tensor."""
        offset = tuple(a + b for a, b in zip(self.offset, inner.offset, strict=True))
        return Box(offset, inner.shape)

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None if there are none."""
        starts = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        sizes = tuple(min(self.end(d), other.end(d)) - start for d, start in enumerate(starts))
        if all(size > 0 for size in sizes):
            return Box(starts, sizes)
        return None

    def subtract(self, other: Box) -> list[Box]:
        """The elements of this box that are not in the other, as disjoint boxes.

        There are two per dim at most.
        """
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces: list[Box] = []
        # Cut off what lies before and after `common` along one dim after another; what remains in
        # `offset` and `shape` has the extent of `common` in all dims so far.
        offset = list(self.offset)
        shape = list(self.shape)
        for dim in range(len(shape)):
            before = common.offset[dim] - offset[dim]
            after = offset[dim] + shape[dim] - common.end(dim)
            for start, size in ((offset[dim], before), (common.end(dim), after)):
                if size > 0:
                    piece_offset = (*offset[:dim], start, *offset[dim + 1 :])
                    piece_shape = (*shape[:dim], size, *shape[dim + 1 :])
                    pieces.append(Box(piece_offset, piece_shape))
            offset[dim] = common.offset[dim]
            shape[dim] = common.shape[dim]
        return pieces


def subtract_all(regions: Iterable[Box], box: Box) -> list[Box]:
    """The rest of several disjoint boxes without `box`."""
    return [piece for region in regions for piece in region.subtract(box)]


def uncovered(region: Box, boxes: Iterable[Box]) -> list[Box]:
    """The part of `region` that no box covers."""
    if region.is_empty:
        return []
    remaining = [region]
    for box in boxes:
        remaining = subtract_all(remaining, box)
    return remaining


@dataclass(frozen=True)
class ParamBox(Box):
    """The part of one parameter that this rank's model holds.

    It is all of the parameter, unless the tensor or expert axis splits it.
    """

    spec: ParamSpec
    copies: int = 1
    """Neighbouring ranks of the tensor axis that hold the same elements."""
    copy: int = 0
    """This rank's place among them."""
    is_partial: bool = False
    """This rank's gradient is a part: those of the ranks with the same elements are added up."""
    sizes: Ints = ()
    """Of all parts along the dim that the tensor axis splits; empty: it does not split this
    parameter."""
    expert_ranks: int = 1
    """Ranks of the expert axis that have equal parts of dim 0, each its own experts; 1: not split
    among them."""
    of_earlier_stage: bool = False
    """An earlier rank of the pipeline holds the same elements."""

    @classmethod
    def whole(
        cls, spec: ParamSpec, copies: int = 1, copy: int = 0, *, is_partial: bool = False
    ) -> ParamBox:
        """All of a parameter."""
        return cls((0,) * len(spec.shape), spec.shape, spec, copies, copy, is_partial)

    @property
    def is_copy(self) -> bool:
        """Whether another rank holds the same elements, counts them in norms and saves them.

        That is an earlier rank of the tensor or pipeline axis.
        """
        return self.copy > 0 or self.of_earlier_stage

    @property
    def dim(self) -> int | None:
        """Along which the tensor axis splits it."""
        if not self.sizes:
            return None
        return self.spec.split_dim

    @property
    def largest(self) -> int:
        """Elements of the largest part on any rank."""
        if self.dim is None:
            return prod(self.shape)
        return prod(self.shape) // self.shape[self.dim] * max(self.sizes)

    @property
    def stacked_shape(self) -> Ints:
        """The shape of the whole parameter with this rank's experts only.

        It is what the tensor axis splits; without an expert axis, the shape of the parameter.
        """
        shape = self.spec.shape
        if self.expert_ranks == 1:
            return shape
        return shape[0] // self.expert_ranks, *shape[1:]


class StateTensor(NamedTuple):
    """One logical tensor in one role (master, exp_avg, ...) and this rank's boxes of it."""

    name: str
    role: str
    shape: Ints
    """Of the whole tensor."""
    boxes: list[tuple[Ints, Tensor]]
    """(offset, values)"""

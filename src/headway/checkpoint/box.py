"""Boxes: the axis-aligned pieces a logical tensor is cut into, as plain integers. A 0-dim tensor is one box with no dims."""

from collections.abc import Iterable
from dataclasses import dataclass

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """The elements `offset[d] <= i[d] < offset[d] + shape[d]` of a tensor."""

    offset: Ints
    shape: Ints

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def end(self, dim: int) -> int:
        return self.offset[dim] + self.shape[dim]

    def slices(self, origin: Ints) -> tuple[slice, ...]:
        """Where this box lies in a tensor that begins at `origin`."""
        return tuple(slice(start - base, start - base + size) for start, size, base in zip(self.offset, self.shape, origin, strict=True))

    def intersect(self, other: "Span") -> "Span | None":
        """The elements in both boxes, or None if there are none."""
        starts = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        sizes = tuple(min(self.end(d), other.end(d)) - start for d, start in enumerate(starts))
        return Span(starts, sizes) if all(size > 0 for size in sizes) else None

    def subtract(self, other: "Span") -> list["Span"]:
        """The elements of this box that are not in the other, as disjoint boxes (two per dim at most)."""
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces: list[Span] = []
        offset, shape = list(self.offset), list(self.shape)
        for dim in range(len(shape)):
            before = common.offset[dim] - offset[dim]
            after = offset[dim] + shape[dim] - common.end(dim)
            for start, size in ((offset[dim], before), (common.end(dim), after)):
                if size > 0:
                    pieces.append(Span((*offset[:dim], start, *offset[dim + 1 :]), (*shape[:dim], size, *shape[dim + 1 :])))
            offset[dim], shape[dim] = common.offset[dim], common.shape[dim]
        return pieces


def take_away(regions: Iterable[Span], box: Span) -> list[Span]:
    """What is left of several disjoint boxes once another is taken away."""
    return [piece for region in regions for piece in region.subtract(box)]


def uncovered(region: Span, boxes: Iterable[Span]) -> list[Span]:
    """What is left of `region` once every box is taken away; empty when the boxes cover it."""
    left = [] if region.is_empty else [region]
    for box in boxes:
        left = take_away(left, box)
    return left

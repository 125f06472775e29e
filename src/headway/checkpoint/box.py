"""Boxes: axis-aligned parts of a logical tensor, as plain integers. A 0-dim tensor is one box without dims."""

from collections.abc import Iterable
from dataclasses import dataclass

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

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes, or None if there are none."""
        starts = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        sizes = tuple(min(self.end(d), other.end(d)) - start for d, start in enumerate(starts))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def subtract(self, other: "Box") -> list["Box"]:
        """The elements of this box that are not in the other, as disjoint boxes (two per dim at most)."""
        common = self.intersect(other)
        if common is None:
            return [self]
        pieces: list[Box] = []
        offset, shape = list(self.offset), list(self.shape)
        for dim in range(len(shape)):
            before = common.offset[dim] - offset[dim]
            after = offset[dim] + shape[dim] - common.end(dim)
            for start, size in ((offset[dim], before), (common.end(dim), after)):
                if size > 0:
                    pieces.append(
                        Box(
                            (*offset[:dim], start, *offset[dim + 1 :]),
                            (*shape[:dim], size, *shape[dim + 1 :]),
                        )
                    )
            offset[dim], shape[dim] = common.offset[dim], common.shape[dim]
        return pieces


def subtract_all(regions: Iterable[Box], box: Box) -> list[Box]:
    """The rest of several disjoint boxes without `box`."""
    return [piece for region in regions for piece in region.subtract(box)]


def uncovered(region: Box, boxes: Iterable[Box]) -> list[Box]:
    """The part of `region` that no box covers."""
    left = [] if region.is_empty else [region]
    for box in boxes:
        left = subtract_all(left, box)
    return left

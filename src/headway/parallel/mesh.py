"""The layout of a run: which rank is what on every axis. One process is a mesh whose axes all have size 1.

    rank = ((pipeline * replicate + r) * shard + s) * context ... tensor innermost

Axes, outermost first: pipeline, replicate, shard, context, tensor. Data parallelism is replicate x shard.
"""

from dataclasses import dataclass

from headway.errors import ParallelError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """Sizes of all axes and this process's rank."""

    rank: int = 0
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            sizes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
            raise ParallelError(f"rank is {self.rank}; the layout {sizes} has ranks 0 to {self.world - 1}.")

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of data-parallel ranks: those that read different rows."""
        return self.replicate * self.shard

    def coordinate(self, axis: str) -> int:
        """This rank's place on one axis."""
        inner = 1
        for other in reversed(AXES):
            if other == axis:
                return self.rank // inner % getattr(self, other)
            inner *= getattr(self, other)
        raise KeyError(axis)

    @property
    def data_rank(self) -> int:
        """Which rows this rank reads."""
        return self.coordinate("replicate") * self.shard + self.coordinate("shard")

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

    def describe(self, strategy: str) -> list[str]:
        """The layout for people; nothing to say about one process."""
        if self.world == 1:
            return []
        names = {"zero1": "data parallel" if self.shard == 1 else f"zero1 over {self.shard}", "fsdp": f"fsdp over {self.shard}"}
        copies = f", {self.replicate} times" if self.shard > 1 and self.replicate > 1 else ""
        return [f"{self.world} ranks: {names[strategy]}{copies}"]

    @property
    def data_rank(self) -> int:
        """Which rows this rank reads."""
        return self.coordinate("replicate") * self.shard + self.coordinate("shard")


def plan_mesh(rank: int, world: int, size: int | str, key: str) -> Mesh:
    """The layout of data-parallel ranks for a shard size given in a recipe under `key`; `auto` cuts over all of them."""
    shard = world if size == "auto" else int(size)
    if shard > world or world % shard:
        fitting = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise ParallelError(f"{key} is {shard}; it must divide the {world} data-parallel ranks. Use auto or {' or '.join(fitting)}.")
    return Mesh(rank=rank, replicate=world // shard, shard=shard)

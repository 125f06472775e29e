"""The layout of a run: which rank is what on every axis. One process is a mesh whose axes all have size 1.

    rank = ((pipeline * replicate + r) * shard + s) * tensor + t

Axes, outermost first: pipeline, replicate, shard, tensor. The gradients of replicate x shard are summed, and the optimizer state is cut
over shard. `context` neighbours among these read the same rows and hold a part of each row's tokens; different rows are data parallelism:

    replicate x shard     0 1 2 3 4 5 6 7
    context 2             0 1|0 1|0 1|0 1      place in the context group
    data                  0 0 1 1 2 2 3 3      which rows
"""

from dataclasses import dataclass

from headway.errors import ParallelError

AXES = ("pipeline", "replicate", "shard", "tensor")


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
        return self.pipeline * self.reduce * self.tensor

    @property
    def reduce(self) -> int:
        """Number of ranks whose gradients are summed: data x context."""
        return self.replicate * self.shard

    @property
    def data(self) -> int:
        """Number of data-parallel ranks: those that read different rows."""
        return self.reduce // self.context

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
        parts = f"; each row's tokens over {self.context} (context)" if self.context > 1 else ""
        return [f"{self.world} ranks: {names[strategy]}{copies}{parts}"]

    @property
    def data_rank(self) -> int:
        """Which rows this rank reads."""
        return self._reduce_rank // self.context

    @property
    def context_rank(self) -> int:
        """Which part of its rows' tokens this rank holds."""
        return self._reduce_rank % self.context

    @property
    def _reduce_rank(self) -> int:
        return self.coordinate("replicate") * self.shard + self.coordinate("shard")


def plan_mesh(rank: int, world: int, size: int | str, key: str, context: int = 1) -> Mesh:
    """The layout of the ranks for a shard size given in a recipe under `key`; `auto` cuts over all of them."""
    if context > world or world % context:
        start = f"start {context} or a multiple of it" if context > world else f"start {world // context * context} ranks"
        raise ParallelError(f"parallel.context is {context}; it must divide the number of ranks, {world}. Lower it, or {start} (--nproc).")
    shard = world if size == "auto" else int(size)
    if shard > world or world % shard:
        fitting = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise ParallelError(f"{key} is {shard}; it must divide the {world} ranks. Use auto or {' or '.join(fitting)}.")
    return Mesh(rank=rank, replicate=world // shard, shard=shard, context=context)

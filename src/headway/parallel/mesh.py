"""The layout of a run: which ranks form a group along which axis.

One process is a mesh whose axes all have size 1.

    rank = ((pipeline * data + d) * context + c) * tensor + t

Axes, outermost first: pipeline, data, context, tensor. `data` ranks read different rows, `context`
ranks hold parts of the same rows. Gradients are summed over both (`reduce`). The same ranks are
also split into `replicate` x `shard`: optimizer state is sharded over `shard`, whatever rows its
ranks read.

    reduce                0 1 2 3 4 5 6 7
    context 2             0 1|0 1|0 1|0 1      position in the context group
    data 4                0 0 1 1 2 2 3 3      which rows
    shard 4               0 1 2 3|0 1 2 3      position in the shard group

`tensor` ranks hold parts of the same layers and see the same tokens, `pipeline` ranks hold
different layers. Only `data` ranks read different rows, so whatever counts rows or tokens counts by
`data`.

`expert` divides the same ranks once more: neighbours hold different experts of every mixture and
still read different rows. What belongs to experts is shared by every `expert`-th rank
(`expert_reduce`), which are split into `expert_replicate` x `expert_shard` as the others are.

    expert 2              0 1|0 1|0 1|0 1      which experts
    expert_shard 2        0 0 1 1|0 0 1 1      position among those that share these experts' state
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod

from headway.errors import ParallelError

AXES = ("pipeline", "replicate", "shard", "tensor")
_VIEWS = (
    AXES,
    ("pipeline", "data", "context", "tensor"),
    ("pipeline", "reduce", "tensor"),
    ("pipeline", "expert_replicate", "expert_shard", "expert", "tensor"),
    ("pipeline", "expert_reduce", "expert", "tensor"),
)
"""The ways in which ranks are numbered by axes, outermost first."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of all axes and this process's rank."""

    rank: int = 0
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            sizes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
            raise ParallelError(
                f"rank is {self.rank}; the layout {sizes} has ranks 0 to {self.world - 1}."
            )

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

    @property
    def expert_reduce(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.reduce // self.expert

    @property
    def expert_shard(self) -> int:
        """Number of ranks of a shard group that hold the same experts."""
        return max(1, self.shard // self.expert)

    @property
    def expert_replicate(self) -> int:
        """Number of ranks that hold the same shard of the same experts."""
        return self.expert_reduce // self.expert_shard

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks of every group along an axis, in order. Each rank is in one group."""
        # An axis of several views has the same groups in all of them.
        view = next(view for view in _VIEWS if axis in view)
        sizes = [getattr(self, name) for name in view]
        index = view.index(axis)
        size = sizes[index]
        outer_size = prod(sizes[:index])
        # Neighbours along an axis are as far apart as the axes inside it have ranks.
        inner_size = prod(sizes[index + 1 :])
        return [
            [(outer * size + position) * inner_size + inner for position in range(size)]
            for outer in range(outer_size)
            for inner in range(inner_size)
        ]

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that work on the same rows: context x tensor x pipeline."""
        return self.world // self.data

    def describe(self, strategy: str) -> list[str]:
        """The layout as text; empty for one process."""
        if self.world == 1:
            return []
        parts: list[str] = []
        if self.reduce > 1:
            sharding = f"{strategy} over {self.shard}"
            if strategy == "zero1" and self.shard == 1:
                sharding = "data parallel"
            if self.shard > 1 and self.replicate > 1:
                sharding += f", {self.replicate} times"
            parts.append(sharding)
        shared = {
            "each row's tokens": "context",
            "each layer": "tensor",
            "the layers": "pipeline",
            "the experts": "expert",
        }
        parts += [
            f"{content} over {getattr(self, axis)} ({axis})"
            for content, axis in shared.items()
            if getattr(self, axis) > 1
        ]
        return [f"{self.world} ranks: {'; '.join(parts)}"]


def plan_mesh(
    rank: int,
    world: int,
    size: int | str,
    key: str,
    *,
    context: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
) -> Mesh:
    """The layout of the ranks for a shard size given in a recipe under `key`.

    `auto` shards over all that share gradients.
    """
    axes = {"pipeline": pipeline, "context": context, "tensor": tensor}
    ranks_per_row = context * tensor * pipeline
    if ranks_per_row > world or world % ranks_per_row:
        if ranks_per_row > world:
            start = f"start {ranks_per_row} or a multiple of it"
        else:
            start = f"start {world // ranks_per_row * ranks_per_row} ranks"
        settings = [f"parallel.{axis} is {degree}" for axis, degree in axes.items() if degree > 1]
        if len(settings) == 1:
            subject = f"{settings[0]}; it"
            lower = "Lower it"
        else:
            subject = f"{' and '.join(settings)}; their product, {ranks_per_row},"
            lower = "Lower one of them"
        raise ParallelError(
            f"{subject} must divide the number of ranks, {world}. {lower}, or {start} (--nproc)."
        )

    reduce = world // (tensor * pipeline)
    shard = reduce
    if size != "auto":
        shard = int(size)
    if shard > reduce or reduce % shard:
        fitting = [str(n) for n in range(1, reduce + 1) if reduce % n == 0]
        if reduce == world:
            ranks = f"the {world} ranks"
        else:
            ranks = f"the {reduce} ranks that share gradients (data x context)"
        raise ParallelError(
            f"{key} is {shard}; it must divide {ranks}. Use auto or {' or '.join(fitting)}."
        )

    for broken in broken_expert_sizes(expert, reduce // context, shard, key):
        fitting = [
            str(n)
            for n in range(1, reduce // context + 1)
            if not any(broken_expert_sizes(n, reduce // context, shard, key))
        ]
        raise ParallelError(f"{broken}. Use {' or '.join(fitting)}.")
    return Mesh(rank=rank, replicate=reduce // shard, shard=shard, expert=expert, **axes)


def broken_expert_sizes(expert: int, data: int, shard: int, key: str) -> Iterator[str]:
    """Why experts cannot be split over `expert` of `data` ranks.

    Neither group may cross the border of the other.
    """
    if expert > data or data % expert:
        yield f"parallel.expert is {expert}; it must divide the {data} data-parallel ranks"
    elif shard % expert and expert % shard:
        yield f"parallel.expert is {expert}; it must divide {key}={shard}, or be a multiple of it"


def ring_ranks(context: int, kv_heads: int, tensor: int) -> int:
    """Context ranks that pass keys around a ring.

    1 where each rank gets whole KV heads of its tensor rank, else as few as possible.
    """
    # As many ranks exchange heads as divide both numbers evenly; the others form the ring.
    return context // gcd(context, max(1, kv_heads // tensor))

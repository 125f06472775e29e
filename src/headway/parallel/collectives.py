"""Communication between ranks.

In a group of one rank every collective is the identity and is skipped.

Collectives are asynchronous: `wait` on the returned handle makes the current stream wait (NCCL) or
the host (gloo). All ranks of a group must start the same collectives in the same order.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import LaunchError, first_line
from headway.parallel.mesh import Mesh
from headway.runtime.heartbeat import Heartbeat
from headway.runtime.process import Process, meeting_point, remember_group

# Newer versions of torch have new names for these two and warn at the old ones.
reduce_scatter_tensors = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_tensors = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
KNOCK_SECONDS = 0.05
"""Between two attempts to reach rank 0 at the start."""


class Handle(Protocol):
    """An asynchronous operation."""

    def wait(self) -> Any:
        """Return when its results may be used."""
        ...


class Done:
    """An operation that is complete."""

    def wait(self) -> None:
        """Return at once."""


@dataclass
class Then:
    """An operation and an action that follows it."""

    first: Handle
    action: Callable[[], Any]

    def wait(self) -> None:
        """Wait, then run the action."""
        self.first.wait()
        self.action()


@dataclass
class _Named:
    """A collective; the heartbeat shows when the host waits for it."""

    work: dist.Work
    name: str
    group: RankGroup

    def wait(self) -> None:
        with self.group.heart.exchanging(self.name, self.group.size, self.group.axis):
            self.work.wait()


@dataclass
class _Several:
    """Several operations that are waited for together."""

    handles: list[Handle]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


class RankGroup:
    """Ranks that exchange tensors.

    `heart` records every collective, so that a report of a hang can name it.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        handle: dist.ProcessGroup | None = None,
        heart: Heartbeat | None = None,
        axis: str = "",
    ) -> None:
        self.rank = rank
        self.size = size
        self.handle = handle
        self.heart = heart or Heartbeat(rank)
        self.axis = axis
        """The axis of the mesh; empty: all ranks."""
        self.timeout: timedelta | None = None
        """How long its ranks wait for each other; groups made of some of them wait as long. None:
        torch's default."""

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Replace a tensor by its sum over ranks."""
        if self.size == 1:
            return Done()
        return self._started(
            "all_reduce", dist.all_reduce(tensor, group=self.handle, async_op=True)
        )

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Handle:
        """This rank's part of the sum over ranks.

        `part` may be a view of `whole` at this rank's position.
        """
        if self.size == 1:
            if part.data_ptr() != whole.data_ptr():
                part.copy_(whole)
            return Done()
        # NCCL works in place where `part` is this rank's part of `whole`.
        if part.is_cuda:
            return self._started(
                "reduce_scatter",
                reduce_scatter_tensors(part, whole, group=self.handle, async_op=True),
            )
        # With gloo, input and output must not overlap.
        separate = torch.empty_like(part)
        work = self._started(
            "reduce_scatter",
            reduce_scatter_tensors(separate, whole, group=self.handle, async_op=True),
        )
        return Then(work, lambda: part.copy_(separate))

    def all_gather(self, whole: Tensor, part: Tensor) -> Handle:
        """All ranks' parts, one after another.

        `part` may be a view of `whole` at this rank's position.
        """
        if self.size == 1:
            if part.data_ptr() != whole.data_ptr():
                whole.copy_(part)
            return Done()
        if not part.is_cuda:
            part = part.clone()  # with gloo, input and output must not overlap
        work = all_gather_tensors(whole, part, group=self.handle, async_op=True)
        return self._started("all_gather", work)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
    ) -> Handle:
        """Part i of `sent` goes to rank i; part i of `received` comes from it.

        Parts are along dim 0, one per rank. All have the same length, unless the sizes say how
        long each is; then tensors have two dims.
        """
        if self.size == 1:
            received.copy_(sent)
            return Done()
        if not sent.is_cuda:  # gloo supports bytes, not every dtype
            received = received.view(torch.uint8)
            sent = sent.view(torch.uint8)
        return self._started(
            "all_to_all",
            dist.all_to_all_single(
                received, sent, received_sizes, sent_sizes, group=self.handle, async_op=True
            ),
        )

    def shift(self, sent: Tensor) -> tuple[Tensor, Handle]:
        """Send a tensor to the next rank of the ring.

        Returns the one that comes from the rank before and when it is there.
        """
        if self.size == 1:
            return sent, Done()
        received = torch.empty_like(sent)
        next_rank = (self.rank + 1) % self.size
        previous_rank = (self.rank - 1) % self.size
        sending = dist.P2POp(dist.isend, sent, group=self.handle, group_peer=next_rank)
        receiving = dist.P2POp(dist.irecv, received, group=self.handle, group_peer=previous_rank)
        # As one batch: a ring of ranks that all send first would wait for ever.
        works = dist.batch_isend_irecv([sending, receiving])
        return received, _Several([self._started("ring shift", work) for work in works])

    def send(self, tensor: Tensor, to: int, what: str) -> Handle:
        """Give a contiguous tensor to one rank of the group, which receives it.

        Messages between two ranks keep their order.
        """
        return self._started(
            f"send of {what} to {self._peer(to)}",
            dist.isend(tensor, group=self.handle, group_dst=to),
        )

    def receive(self, tensor: Tensor, source: int, what: str) -> Handle:
        """Take a tensor from one rank of the group into this one."""
        return self._started(
            f"receive of {what} from {self._peer(source)}",
            dist.irecv(tensor, group=self.handle, group_src=source),
        )

    def _peer(self, position: int) -> str:
        if self.handle is not None:
            return f"rank {dist.get_global_rank(self.handle, position)}"
        return f"position {position}"

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Every rank gets what the tensor holds on one of them."""
        if self.size == 1:
            return Done()
        return self._started(
            "broadcast", dist.broadcast(tensor, group=self.handle, group_src=source, async_op=True)
        )

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (plain Python), in rank order, on every rank."""
        if self.size == 1:
            return [value]
        answers: list[Any] = [None] * self.size
        with self.exchanging("gather of values"):
            dist.all_gather_object(answers, value, group=self.handle)
        return answers

    def sum(self, values: list[float]) -> list[float]:
        """Host numbers added over ranks."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self.exchanging("sum of numbers"):
            dist.all_reduce(total, group=self.handle)
        return total.tolist()

    def max(self, value: int) -> int:
        """The largest of the ranks' host numbers."""
        return self.max_each([value])[0]

    def max_each(self, values: list[int], name: str = "agreement") -> list[int]:
        """The elementwise maximum of the ranks' host numbers."""
        if self.size == 1:
            return values
        largest = torch.tensor(values)
        with self.exchanging(name):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.handle)
        return [int(value) for value in largest]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.max_each([0], "barrier")

    @contextmanager
    def exchanging(self, name: str) -> Iterator[None]:
        """Around an exchange of this group that waits; the heartbeat shows and counts it."""
        self.heart.count(name)
        with self.heart.exchanging(name, self.size, self.axis):
            yield

    def _started(self, name: str, work: dist.Work | None) -> Handle:
        """The handle of a collective that torch has started; the heartbeat counts it."""
        assert work is not None
        self.heart.count(name)
        return _Named(work, name, self)

    def host_group(self, timeout_seconds: float) -> RankGroup:
        """The same ranks over separate gloo connections.

        A thread needs them, whose collectives run at any time.
        """
        if self.size == 1:
            return self
        handle = _connect(
            self.rank, "world", backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )
        return RankGroup(self.rank, self.size, handle)  # pyright: ignore[reportArgumentType]

    def close(self, *, orderly: bool = True) -> None:
        """End communication.

        If orderly, all ranks wait for each other first: gloo may abort a process that others still
        use.
        """
        if self.size > 1 and dist.is_initialized():
            # After an error other ranks may be gone or stuck: waiting for them would hang.
            if orderly:
                self.barrier()
            dist.destroy_process_group()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(orderly=kind is None)


def start_group(
    process: Process,
    backend: Literal["gloo", "nccl"],
    timeout_seconds: float,
    heart: Heartbeat | None = None,
) -> RankGroup:
    """Join the other processes of a run.

    The launcher sets MASTER_ADDR and MASTER_PORT. Does nothing for a single process.
    """
    if process.world == 1:
        return RankGroup(heart=heart)
    # With NCCL, host numbers (agreements, counts) still travel over gloo.
    kinds = "gloo"
    if backend == "nccl":
        kinds = "cpu:gloo,cuda:nccl"
    remember_group()
    try:
        dist.init_process_group(
            kinds,
            store=_join_store(process, timeout_seconds),
            rank=process.rank,
            world_size=process.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except ValueError as problem:
        raise LaunchError(
            f"rank {process.rank} of {process.world} cannot connect to the other ranks: {problem}. "
            "Start it with torchrun, or set MASTER_ADDR and MASTER_PORT."
        ) from None
    except dist.DistError as problem:
        waited = (
            f"could not connect to the other ranks within {timeout_seconds:.0f} s: "
            f"{first_line(problem)}"
        )
        raise LaunchError(f"rank {process.rank} of {process.world} {waited}") from None
    world = RankGroup(process.rank, process.world, dist.group.WORLD, heart)
    world.timeout = timedelta(seconds=timeout_seconds)
    return world


def _join_store(process: Process, timeout_seconds: float) -> dist.Store:
    """The key-value store of rank 0, through which ranks find each other."""
    timeout = timedelta(seconds=timeout_seconds)
    connecting = timeout
    if process.rank > 0:
        seconds_left = _wait_for_rank_0(process, timeout_seconds)
        # torch tries to connect for its time-out, pauses up to as long, and tries once more.
        connecting = timedelta(seconds=seconds_left / 3)
    store, _, _ = next(dist.rendezvous("env://", process.rank, process.world, timeout=connecting))
    store.set_timeout(timeout)
    return dist.PrefixStore("default_pg", store)


def _wait_for_rank_0(process: Process, timeout_seconds: float) -> float:
    """Return when rank 0 accepts connections; the seconds that are left of the time-out.

    torch's own wait takes up to three times the time-out where rank 0 is gone.
    """
    address = meeting_point()
    deadline = time.monotonic() + timeout_seconds
    while True:
        seconds_left = deadline - time.monotonic()
        # Without an address torch says which variables it needs.
        if address is None:
            return seconds_left
        if seconds_left <= 0:
            raise LaunchError(
                f"rank {process.rank} of {process.world} could not connect to the other ranks "
                f"within {timeout_seconds:.0f} s: rank 0 does not answer at {address[0]}:"
                f"{address[1]} (MASTER_ADDR, MASTER_PORT). See the log of rank 0; if it runs, "
                "check the address."
            )
        try:
            socket.create_connection(address, seconds_left).close()
        except OSError:
            time.sleep(min(KNOCK_SECONDS, seconds_left))
        else:
            return max(deadline - time.monotonic(), KNOCK_SECONDS)


@dataclass(frozen=True)
class RankGroups:
    """The groups of a mesh that this rank is in. The default is one process."""

    mesh: Mesh = Mesh()
    world: RankGroup = field(default_factory=RankGroup)
    data: RankGroup = field(default_factory=RankGroup)
    """Ranks that read different rows; loaders count by it. Where rows are split over ranks, those
    with the same part of their rows."""
    reduce: RankGroup = field(default_factory=RankGroup)
    """All ranks whose gradients, losses and metrics are summed: data x context."""
    shard: RankGroup = field(default_factory=RankGroup)
    """Ranks over which the optimizer state is sharded."""
    replicate: RankGroup = field(default_factory=RankGroup)
    """Ranks that hold the same shard."""
    context: RankGroup = field(default_factory=RankGroup)
    """Ranks that hold parts of the same rows."""
    tensor: RankGroup = field(default_factory=RankGroup)
    """Ranks that hold parts of the same layers."""
    pipeline: RankGroup = field(default_factory=RankGroup)
    """Ranks that hold different layers."""
    expert: RankGroup = field(default_factory=RankGroup)
    """Ranks that hold different experts of the same mixtures and read different rows."""
    expert_reduce: RankGroup = field(default_factory=RankGroup)
    """Ranks that hold the same experts; they sum the gradients of these. Used where `expert` has
    several ranks, as the next two are."""
    expert_shard: RankGroup = field(default_factory=RankGroup)
    expert_replicate: RankGroup = field(default_factory=RankGroup)

    def of_experts(self) -> RankGroups:
        """The groups of ranks that share the parameters of this rank's experts.

        As for other parameters, without the ranks that hold other experts.
        """
        if self.mesh.expert == 1:
            return self
        return replace(
            self,
            reduce=self.expert_reduce,
            shard=self.expert_shard,
            replicate=self.expert_replicate,
        )


SHARED_AXES = ("shard", "replicate", "data", "reduce")
EXPERT_AXES = ("expert_shard", "expert_replicate", "expert_reduce")
LAYER_AXES = ("context", "tensor", "pipeline", "expert")
"""Groups of LAYER_AXES exchange inside layers, at the same time as the others, so they have
separate connections."""


def form_groups(mesh: Mesh, world: RankGroup) -> RankGroups:
    """Make the groups of a mesh. Every rank makes all groups, in the same order."""
    if mesh.world == 1:
        return RankGroups(mesh, world)  # the world's heartbeat is the run's
    axes = SHARED_AXES
    if mesh.expert > 1:
        axes = (*SHARED_AXES, *EXPERT_AXES)
    # These exchange one after another, so axes with the same groups share their connections.
    shared: dict[str, RankGroup] = {}
    for axis in axes:
        same = next((other for other in shared if mesh.groups(other) == mesh.groups(axis)), None)
        if same:
            shared[axis] = shared[same]
        # One group of all ranks exists already.
        elif len(mesh.groups(axis)) == 1:
            shared[axis] = world
        else:
            shared[axis] = _join(mesh, axis, world)
    layer_groups = {axis: _join(mesh, axis, world) for axis in LAYER_AXES}
    return RankGroups(mesh, world, **shared, **layer_groups)


def _connect(rank: int, axis: str, **options: Any) -> Any:
    """A new group of torch; a rank that has gone meanwhile is an error of one line."""
    try:
        return dist.new_group(**options)
    except dist.DistError as problem:
        raise LaunchError(
            f"rank {rank} could not connect to the other ranks of the axis {axis}: "
            f"{first_line(problem)}"
        ) from None


def _join(mesh: Mesh, axis: str, world: RankGroup) -> RankGroup:
    """Make all groups of an axis; returns the one this rank is in."""
    return _join_one(mesh.groups(axis), axis, world)


def _join_one(groups: list[list[int]], axis: str, world: RankGroup) -> RankGroup:
    """As `_join`, from lists of ranks. torch wants every rank to make every group."""
    joined = RankGroup(heart=world.heart, axis=axis)
    if len(groups[0]) == 1:
        return joined
    for ranks in groups:
        handle = _connect(world.rank, axis, ranks=ranks, timeout=world.timeout)
        if world.rank in ranks:
            joined = RankGroup(ranks.index(world.rank), len(ranks), handle, world.heart, axis)
    return joined


def split_context(ranks: RankGroups, ring: int) -> tuple[RankGroup, RankGroup]:
    """(ring group, group that exchanges heads) of this rank.

    Neighbours of a context group exchange heads; ranks of the same position in these groups form a
    ring of `ring` ranks.
    """
    context = ranks.context
    if ring == 1:
        return RankGroup(), context
    # Neighbours, likely on one machine, exchange heads and wait for them. The ring, whose messages
    # hide behind arithmetic, spans the greater distance.
    inner = context.size // ring
    rings = [
        group[position::inner]
        for group in ranks.mesh.groups("context")
        for position in range(inner)
    ]
    heads = [
        group[start : start + inner]
        for group in ranks.mesh.groups("context")
        for start in range(0, context.size, inner)
    ]
    return _join_one(rings, "ring", ranks.world), _join_one(heads, "context", ranks.world)


def split_group(ranks: RankGroups, axis: str, size: int) -> RankGroup:
    """Groups of `size` neighbours along an axis. All ranks of the run call this together."""
    groups = [
        whole[start : start + size]
        for whole in ranks.mesh.groups(axis)
        for start in range(0, len(whole), size)
    ]
    return _join_one(groups, axis, ranks.world)


class DifferentiableCollectives:
    """Differentiable collectives for objectives. A gradient is the sum of all ranks' shares."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def sum(self, value: Tensor) -> Tensor:
        """The sum over ranks."""
        if self.group.size == 1:
            return value
        return _Sum.apply(value, self.group)  # pyright: ignore[reportReturnType]

    def gather(self, value: Tensor) -> Tensor:
        """All ranks' values along dim 0."""
        if self.group.size == 1:
            return value
        return _Gather.apply(value, self.group)  # pyright: ignore[reportReturnType]


class _Sum(torch.autograd.Function):
    """Every rank's loss uses the sum, so its gradient is the sum of the gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        total = value.detach().clone().contiguous()
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].clone().contiguous()
        ctx.group.all_reduce(total).wait()
        return total, None


class _Gather(torch.autograd.Function):
    """As `_Sum`: backward gives a rank the sum over all ranks of its part's gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        ctx.shape = value.shape
        whole = value.new_empty(group.size * value.shape[0], *value.shape[1:])
        group.all_gather(whole, value.detach().contiguous()).wait()
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        part = grads[0].new_empty(ctx.shape)
        ctx.group.reduce_scatter(part, grads[0].contiguous()).wait()
        return part, None

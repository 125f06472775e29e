"""Whole parameters under FSDP: each is updated by one rank, its owner.

Gradients and masters travel to the owners, the new masters travel back.

A rank has rows [r c .. (r+1) c) of every parameter, c = ceil(rows / ranks). Parameters of one shape
are exchanged together, `ranks` of them (or a multiple) at a time, so that every rank receives as
many as it gives:

    rank 0   rows of A, B, C, D          ->   all rows of A
    rank 1   rows of A, B, C, D          ->   all rows of B
    ...
    one all-to-all each for gradients and masters, one back for the new masters

The i-th parameter of a shape belongs to rank (first + i) % ranks; `first` continues from shape to
shape, so that shapes of which there are few do not all land on rank 0. An owner has the state of
its parameters, whole; the others have none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from headway.parallel.collectives import RankGroup
from headway.parallel.update_rules import WholeParameter, WholeState

EXCHANGE_ELEMENTS = 1 << 26
"""Elements of the whole parameters that a rank receives at a time."""
Ints = tuple[int, ...]


@dataclass(frozen=True)
class ShardedMember:
    """A rank's rows of one parameter, and its state if the rank is the owner."""

    shape: Ints
    """Of the whole parameter."""
    master: Tensor
    gradient: Tensor
    state: WholeState
    step: Tensor


def owners(shapes: dict[str, Ints], ranks: int) -> dict[str, int]:
    """The rank that updates each parameter."""
    owner: dict[str, int] = {}
    for names in by_shape(shapes).values():
        for name in names:
            owner[name] = len(owner) % ranks
    return owner


def by_shape(shapes: dict[str, Ints]) -> dict[Ints, list[str]]:
    """Names of equal shape, in the order they come."""
    same: dict[Ints, list[str]] = {}
    for name, shape in shapes.items():
        same.setdefault(shape, []).append(name)
    return same


def update_whole(
    members: dict[str, ShardedMember],
    owner: dict[str, int],
    group: RankGroup,
    update: Callable[[Sequence[WholeParameter]], None],
) -> None:
    """Send every parameter to its owner, call `update` there, and send the new rows back.

    All ranks of the group call this with the same names in the same order. `update` changes every
    `master` in place.
    """
    for shape, names in by_shape({name: member.shape for name, member in members.items()}).items():
        per_rank = max(1, EXCHANGE_ELEMENTS // max(1, prod(shape)))
        count = per_rank * group.size
        for start in range(0, len(names), count):
            batch = {name: members[name] for name in names[start : start + count]}
            _update_batch(batch, owner, group, update)


def _update_batch(
    members: dict[str, ShardedMember],
    owner: dict[str, int],
    group: RankGroup,
    update: Callable[[Sequence[WholeParameter]], None],
) -> None:
    """Exchange and update some parameters of one shape."""
    first = next(iter(members.values()))
    rows_per_rank = -(-first.shape[0] // group.size)
    row_elements = prod(first.shape[1:])
    places = _places([owner[name] for name in members], group.size)
    # The parts of an all-to-all are equal, so every rank is sent as many parameters as the rank
    # that owns most of them; the others get zeros for those that they do not have.
    depth = max(index for _, index in places) + 1

    def to_owners(local: Sequence[Tensor]) -> Tensor:
        """[depth, ranks * rows_per_rank, ...]: the parameters that this rank owns, with all rows.

        The last rows are zeros where the rows do not divide evenly.
        """
        sent = torch.zeros(
            group.size,
            depth,
            rows_per_rank * row_elements,
            dtype=torch.float32,
            device=first.master.device,
        )
        for (rank, index), tensor in zip(places, local, strict=True):
            sent[rank, index, : tensor.numel()].copy_(tensor.reshape(-1))
        received = torch.empty_like(sent)
        group.all_to_all(received, sent).wait()
        return received.transpose(0, 1).reshape(depth, group.size * rows_per_rank, *first.shape[1:])

    gradients = to_owners([member.gradient for member in members.values()])
    masters = to_owners([member.master for member in members.values()])
    parameters: list[WholeParameter] = []
    for (rank, index), member in zip(places, members.values(), strict=True):
        if rank == group.rank:
            whole_rows = member.shape[0]
            # A view: the new values are sent back from `masters`.
            master = masters[index, :whole_rows]
            gradient = gradients[index, :whole_rows]
            # A copy of the counter: the engine advances it on all ranks, not only on the owner.
            step = member.step.clone()
            parameters.append(WholeParameter(master, gradient, member.state, step))
    update(parameters)

    # Back: every rank gets its rows of all new masters.
    by_rank = masters.view(depth, group.size, rows_per_rank * row_elements)
    sent = by_rank.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    group.all_to_all(received, sent).wait()
    for (rank, index), member in zip(places, members.values(), strict=True):
        local = received[rank, index, : member.master.numel()]
        member.master.copy_(local.view(member.master.shape))


def _places(ranks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """(owner, index among the owner's parameters) of each parameter; `ranks` has their owners."""
    counts = [0] * size
    places: list[tuple[int, int]] = []
    for rank in ranks:
        places.append((rank, counts[rank]))
        counts[rank] += 1
    return places

"""Whole parameters under FSDP: their gradients and masters travel to the ranks that update them, the new masters travel back.

A rank has rows [r c .. (r+1) c) of every parameter, c = ceil(rows / ranks). Parameters of one shape are exchanged together, `ranks` of them
(or a multiple) at a time, so that every rank receives as many as it gives:

    rank 0   rows of A, B, C, D          ->   all rows of A
    rank 1   rows of A, B, C, D          ->   all rows of B          one all-to-all each for gradients and masters, one back
    ...

The i-th parameter of a shape belongs to rank (first + i) % ranks; `first` continues from shape to shape, so that shapes of which there are
few do not all land on rank 0. An owner has the state of its parameters, whole; the others have none of it.
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
    found: dict[str, int] = {}
    for names in by_shape(shapes).values():
        found |= {name: at % ranks for at, name in enumerate(names, start=len(found))}
    return found


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
    """Give every parameter to its owner, call `update` there with whole ones, and take the new rows back."""
    for shape, names in by_shape({name: member.shape for name, member in members.items()}).items():
        each = max(1, EXCHANGE_ELEMENTS // max(1, prod(shape))) * group.size
        for start in range(0, len(names), each):
            part = names[start : start + each]
            _update_some({name: members[name] for name in part}, owner, group, update)


def _update_some(
    members: dict[str, ShardedMember],
    owner: dict[str, int],
    group: RankGroup,
    update: Callable[[Sequence[WholeParameter]], None],
) -> None:
    first = next(iter(members.values()))
    rows, inner = -(-first.shape[0] // group.size), prod(first.shape[1:])
    places = _places([owner[name] for name in members], group.size)
    depth = max(depth for _, depth in places) + 1

    def to_owners(local: Sequence[Tensor]) -> Tensor:
        """[depth, ranks * rows, ...]: this rank's own parameters, each with all its rows (and some empty ones at the end)."""
        given = torch.zeros(
            group.size, depth, rows * inner, dtype=torch.float32, device=first.master.device
        )
        for (rank, at), tensor in zip(places, local, strict=True):
            given[rank, at, : tensor.numel()].copy_(tensor.reshape(-1))
        received = torch.empty_like(given)
        group.all_to_all(received, given).wait()
        return received.transpose(0, 1).reshape(depth, group.size * rows, *first.shape[1:])

    gradients, masters = (
        to_owners([one.gradient for one in members.values()]),
        to_owners([one.master for one in members.values()]),
    )
    mine = [
        (at, one)
        for (rank, at), one in zip(places, members.values(), strict=True)
        if rank == group.rank
    ]
    counts = [one.step.clone() for _, one in mine]
    update(
        [
            WholeParameter(
                masters[at, : one.shape[0]], gradients[at, : one.shape[0]], one.state, count
            )
            for (at, one), count in zip(mine, counts, strict=True)
        ]
    )
    given = masters.view(depth, group.size, rows * inner).transpose(0, 1).contiguous()
    received = torch.empty_like(given)
    group.all_to_all(received, given).wait()
    for (rank, at), one in zip(places, members.values(), strict=True):
        one.master.copy_(received[rank, at, : one.master.numel()].view(one.master.shape))


def _places(ranks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """(owner, how many of its parameters came before) of each."""
    seen = [0] * size
    places: list[tuple[int, int]] = []
    for rank in ranks:
        places.append((rank, seen[rank]))
        seen[rank] += 1
    return places

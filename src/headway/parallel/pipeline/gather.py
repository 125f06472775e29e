"""Parameters of all stages on every rank, one at a time: (name, tensor) pairs of each rank come in, those of all ranks go out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.parallel.collectives import RankGroup


def over_stages(
    values: Iterable[tuple[str, Tensor]], pipeline: RankGroup
) -> Iterator[tuple[str, Tensor]]:
    """What the ranks of a pipeline have, rank after rank. Every rank iterates to the end; it holds one tensor of another rank at a time."""
    for source in range(pipeline.size):
        own = iter(values) if source == pipeline.rank else None
        while True:
            name, value = next(own, ("", None)) if own is not None else ("", None)
            header = (
                None
                if value is None
                else (
                    name,
                    tuple(value.shape),
                    str(value.dtype).removeprefix("torch."),
                    str(value.device),
                )
            )
            header = pipeline.gather(header)[source]
            if header is None:
                break
            if value is None:
                name, shape, dtype, device = header
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=_here(device))
            value = value.contiguous()
            pipeline.broadcast(value, source).wait()
            yield name, value


def merge_scalars(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a hook keeps on all stages: entries by parameter together, of counts the largest (a stage may have nothing to exchange)."""
    found = dict(stages[0])
    for stage in stages[1:]:
        for key, value in stage.items():
            if isinstance(value, dict):
                found[key] = {**found[key], **value}
            elif isinstance(value, int):
                found[key] = max(found[key], value)
    return found


def held_scalars(scalars: Mapping[str, Any], holds: Callable[[str], bool]) -> dict[str, Any]:
    """The entries of this rank's parameters, and everything that is not by parameter."""
    return {
        key: {name: one for name, one in value.items() if holds(name)}
        if isinstance(value, dict)
        else value
        for key, value in scalars.items()
    }


def _here(device: str) -> torch.device:
    """The same kind of device on this rank."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if device.startswith("cuda")
        else torch.device(device)
    )

"""Parameters of all stages on every rank, one at a time.

(name, tensor) pairs of each rank come in, those of all ranks go out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headway.parallel.collectives import RankGroup


def over_stages(
    values: Iterable[tuple[str, Tensor]], pipeline: RankGroup
) -> Iterator[tuple[str, Tensor]]:
    """What the ranks of a pipeline have, rank after rank.

    Every rank iterates to the end; it holds one tensor of another rank at a time.
    """
    for source in range(pipeline.size):
        local_values: Iterator[tuple[str, Tensor]] = iter(())
        if source == pipeline.rank:
            local_values = iter(values)
        while True:
            # The source announces each tensor, so that others can allocate memory; None ends it.
            name, value = next(local_values, ("", None))
            announced = None
            if value is not None:
                dtype = str(value.dtype).removeprefix("torch.")
                announced = (name, tuple(value.shape), dtype, str(value.device))
            header = pipeline.gather(announced)[source]
            if header is None:
                break
            if value is None:
                name, shape, dtype, device = header
                value = torch.empty(
                    shape, dtype=getattr(torch, dtype), device=_local_device(device)
                )
            value = value.contiguous()
            pipeline.broadcast(value, source).wait()
            yield name, value


def merge_scalars(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scalars of a hook from all stages as one: what a run without a pipeline would save.

    Entries by parameter are united. Of counts the largest is right: a stage may have nothing to
    exchange and never count.
    """
    merged = dict(stages[0])
    for stage in stages[1:]:
        for key, value in stage.items():
            if isinstance(value, dict):
                merged[key] = {**merged[key], **value}
            elif isinstance(value, int):
                merged[key] = max(merged[key], value)
    return merged


def held_scalars(scalars: Mapping[str, Any], holds: Callable[[str], bool]) -> dict[str, Any]:
    """The entries of this rank's parameters, and everything that is not by parameter."""
    held: dict[str, Any] = {}
    for key, value in scalars.items():
        if isinstance(value, dict):
            value = {name: entry for name, entry in value.items() if holds(name)}
        held[key] = value
    return held


def _local_device(device: str) -> torch.device:
    """The same kind of device on this rank."""
    if device.startswith("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)

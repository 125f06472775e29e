"""Parameters of all stages on every rank, one at a time: (name, tensor) pairs of each rank come in, those of all ranks go out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from headway.parallel.collectives import RankGroup


def over_stages(values: Iterable[tuple[str, Tensor]], pipeline: RankGroup) -> Iterator[tuple[str, Tensor]]:
    """What the ranks of a pipeline have, rank after rank. Every rank iterates to the end; it holds one tensor of another rank at a time."""
    for source in range(pipeline.size):
        own = iter(values) if source == pipeline.rank else None
        while True:
            name, value = next(own, ("", None)) if own is not None else ("", None)
            header = None if value is None else (name, tuple(value.shape), str(value.dtype).removeprefix("torch."), str(value.device))
            header = pipeline.gather(header)[source]
            if header is None:
                break
            if value is None:
                name, shape, dtype, device = header
                value = torch.empty(shape, dtype=getattr(torch, dtype), device=_here(device))
            value = value.contiguous()
            pipeline.broadcast(value, source).wait()
            yield name, value


def _here(device: str) -> torch.device:
    """The same kind of device on this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if device.startswith("cuda") else torch.device(device)

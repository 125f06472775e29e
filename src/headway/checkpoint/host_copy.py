"""A copy of the state in host memory, so that training continues while it is written. Every save reuses the same slabs.

    device:  master | exp_avg | exp_avg_sq ...        host: [ slab ][ slab ] ...   page-locked where the state is on a GPU

Only one copy exists at a time: a save needs as much host memory as the state of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headway.parallel.box import StateTensor

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 256 << 20
ALIGN_BYTES = 64


class HostCopy:
    """Copies records to the host. The result is valid until the next copy."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, records: Iterable[StateTensor]) -> list[StateTensor]:
        """The same records with their boxes on the host. Returns when the copy is complete."""
        import torch

        records = list(records)
        sources = [tensor.detach() for record in records for _, tensor in record.boxes]
        device = next((tensor.device for tensor in sources if tensor.is_cuda), None)
        targets = self._allocate(sources, pinned=device is not None)
        if device is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            stream = self._stream = self._stream or torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            stream.synchronize()
        copies = iter(targets)
        return [
            record._replace(boxes=[(offset, next(copies)) for offset, _ in record.boxes])
            for record in records
        ]

    def _allocate(self, sources: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        """A slice of a slab for each tensor. Missing slabs are allocated."""
        import torch

        found: list[torch.Tensor] = []
        slab, at = 0, 0
        left = sum(-(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES for source in sources)
        for source in sources:
            if slab < len(self._slabs) and at + source.nbytes > self._slabs[slab].nbytes:
                slab, at = slab + 1, 0
            if slab < len(self._slabs) and source.nbytes > self._slabs[slab].nbytes:
                del self._slabs[slab:]  # the layout has changed: allocate again from here
            if slab == len(self._slabs):
                self._slabs.append(
                    torch.empty(
                        max(min(SLAB_BYTES, left), source.nbytes),
                        dtype=torch.uint8,
                        pin_memory=pinned,
                    )
                )
            piece = self._slabs[slab][at : at + source.nbytes]
            found.append(piece.view(source.dtype).view(source.shape))
            taken = -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES
            at, left = at + taken, left - taken
        return found

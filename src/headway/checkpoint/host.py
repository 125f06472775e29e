"""A copy of the state in host memory, so that training goes on while it is written: slabs allocated once and used again by every save.

    device:  master | exp_avg | exp_avg_sq ...        host: [ slab ][ slab ] ...   page-locked where the state is on a GPU

One copy exists at a time, so the memory a save takes is the size of this rank's state and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headway.checkpoint.save import TensorRecord

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 256 << 20
ALIGN_BYTES = 64


class HostCopy:
    """Copies records to the host; what it returns holds until the next copy."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(slab.nbytes for slab in self._slabs)

    def take(self, records: Iterable[TensorRecord]) -> list[TensorRecord]:
        """The same records with their boxes on the host; returns when every byte has arrived."""
        import torch

        records = list(records)
        sources = [tensor.detach() for record in records for _, tensor in record.boxes]
        device = next((tensor.device for tensor in sources if tensor.is_cuda), None)
        targets = self._places(sources, pinned=device is not None)
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
        return [TensorRecord(one.name, one.role, one.global_shape, [(offset, next(copies)) for offset, _ in one.boxes]) for one in records]

    def _places(self, sources: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        """A piece of a slab for each tensor, slab after slab; missing slabs are allocated."""
        import torch

        found: list[torch.Tensor] = []
        slab, at = 0, 0
        left = sum(-(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES for source in sources)
        for source in sources:
            if slab < len(self._slabs) and at + source.nbytes > self._slabs[slab].nbytes:
                slab, at = slab + 1, 0
            if slab < len(self._slabs) and source.nbytes > self._slabs[slab].nbytes:
                del self._slabs[slab:]  # the layout has changed; from here on it is cut anew
            if slab == len(self._slabs):
                self._slabs.append(torch.empty(max(min(SLAB_BYTES, left), source.nbytes), dtype=torch.uint8, pin_memory=pinned))
            piece = self._slabs[slab][at : at + source.nbytes]
            found.append(piece.view(source.dtype).view(source.shape))
            taken = -(-source.nbytes // ALIGN_BYTES) * ALIGN_BYTES
            at, left = at + taken, left - taken
        return found

"""A copy of the state in host memory, so that training continues while it is written.

The copies lie one after the other in slabs, large blocks of host memory that every save reuses:
page-locked memory takes long to allocate.

    device:  master | exp_avg | exp_avg_sq ...
    host:    [ slab ][ slab ] ...                 page-locked where the state is on a GPU

Only one copy exists at a time: a save needs as much host memory as the state of this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headway.parallel.box import StateTensor

if TYPE_CHECKING:
    import torch

SLAB_BYTES = 256 << 20
"""Host memory grows by slabs of this size; the slabs of earlier saves are reused."""
ALIGN_BYTES = 64
"""Every copy begins at a multiple of this (a cache line), whatever its dtype."""


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
        # Some states of an optimizer are on the host even if the parameters are on a GPU.
        device = next((tensor.device for tensor in sources if tensor.is_cuda), None)
        targets = self._allocate(sources, pinned=device is not None)
        if device is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            stream = self._stream = self._stream or torch.cuda.Stream(device)
            # The optimizer step that wrote these tensors may still be running.
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            stream.synchronize()

        # The targets are in the order of the sources: record by record, box by box.
        copies = iter(targets)
        return [
            record._replace(boxes=[(offset, next(copies)) for offset, _ in record.boxes])
            for record in records
        ]

    def _allocate(self, sources: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        """A slice of a slab for each tensor, with its dtype and shape; missing slabs are added."""
        import torch

        slices: list[torch.Tensor] = []
        slab_index = 0
        offset = 0
        bytes_left = sum(_aligned(source.nbytes) for source in sources)
        for source in sources:
            # A tensor is not split over slabs; the end of a slab may stay unused.
            if (
                slab_index < len(self._slabs)
                and offset + source.nbytes > self._slabs[slab_index].nbytes
            ):
                slab_index += 1
                offset = 0
            # A slab of an earlier save that is too small even when empty: the tensors have changed
            # since. It and those after it are allocated again.
            if slab_index < len(self._slabs) and source.nbytes > self._slabs[slab_index].nbytes:
                del self._slabs[slab_index:]

            if slab_index == len(self._slabs):
                # A tensor larger than a slab gets one of its size; the last slab is as small as
                # what is left.
                slab_bytes = max(min(SLAB_BYTES, bytes_left), source.nbytes)
                self._slabs.append(torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=pinned))

            piece = self._slabs[slab_index][offset : offset + source.nbytes]
            slices.append(piece.view(source.dtype).view(source.shape))
            offset += _aligned(source.nbytes)
            bytes_left -= _aligned(source.nbytes)
        return slices


def _aligned(nbytes: int) -> int:
    """Rounded up to a multiple of ALIGN_BYTES."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES

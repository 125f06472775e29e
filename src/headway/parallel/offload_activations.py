"""Activations that are kept in host memory between forward and backward.

    forward   block 0   block 1   block 2 ...     a copy stream sends what autograd saved of a block
    host         [0]       [1]       [2]          while later blocks compute
    backward                      ... block 2     a block's tensors come back while the block above
                                                  it computes

Only large tensors are offloaded, each storage once however often it is saved; parameters and what
all blocks share never are. At most two blocks are being copied out; a third waits, so that memory
stays bounded where the link is slower than the arithmetic. With whole blocks recomputed, only their
inputs are saved and offloaded. On a CPU device the same tensors are copied and used from their
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device."""
AHEAD = 2
"""Blocks that may be copied out at the same time."""


class BlockRecord:
    """What one block saved in one forward.

    Holds its storages by weak reference; their users keep them alive.
    """

    def __init__(self, previous: BlockRecord | None) -> None:
        self.previous = previous
        """The block below, whose tensors backward needs next."""
        self.moved: list[ref[OffloadedStorage]] = []
        self.sources: list[Tensor] = []
        """Kept alive until they have been copied."""
        self.left: torch.Event | None = None
        """When all copies to the host are complete."""
        self.arrived: torch.Event | None = None
        """When all copies back to the device are complete."""
        self.is_back = False
        """Whether the copies back have begun."""


class OffloadedStorage:
    """One storage in host memory, and its copy on the device while a backward needs it."""

    def __init__(self, record: BlockRecord, host: Tensor) -> None:
        self.record = record
        self.host = host
        self.restored: Tensor | None = None


class ActivationOffload:
    """Moves what blocks save, in both directions."""

    def __init__(self, device: torch.device, min_bytes: int | None = None) -> None:
        self.device = torch.empty(0, device=device).device  # with its number, as tensors have it
        self.min_bytes = MIN_BYTES
        if min_bytes is not None:
            self.min_bytes = min_bytes
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        self.moved_bytes = 0
        """Over all steps so far."""
        self._newest: BlockRecord | None = None
        """The block whose forward began last."""
        self._active: BlockRecord | None = None
        """The block whose backward runs."""

    def wrap(self, block: nn.Module, *, first: bool) -> None:
        """Offload a block's saved tensors.

        `first`: it is the first block of a forward, so no block below it is fetched ahead.
        """
        inner = block.forward

        def forward(*inputs: Any, **named: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return inner(*inputs, **named)
            record = self._begin(first)
            # The first input is the stream, which belongs to this block; the others (masks,
            # rotations) are the same tensors in all blocks.
            shared_inputs = _tensors((*inputs[1:], *named.values()))
            stay = {_storage(tensor) for tensor in (*shared_inputs, *block.parameters())}
            with torch.autograd.graph.saved_tensors_hooks(self._packer(record, stay), _unpack):
                out = inner(*inputs, **named)
            if self.stream is not None:
                record.left = self.stream.record_event()
            return out

        def _unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return self._bring_back(*packed)

        block.forward = forward

    def _begin(self, first: bool) -> BlockRecord:
        """Start the record of a block, and wait for the block AHEAD before it to be copied out."""
        previous = self._newest
        if first:
            previous = None
        record = self._newest = BlockRecord(previous)
        self._active = None

        oldest: BlockRecord | None = record
        for _ in range(AHEAD):
            if oldest is not None:
                oldest = oldest.previous
        if oldest is not None:
            self._release(oldest)
        return record

    def _release(self, record: BlockRecord) -> None:
        """Free the device's tensors of a block once they have been copied to the host.

        The stream waits, not the host: memory freed here is used by work that is queued later.
        """
        if record.left is not None:
            torch.cuda.current_stream(self.device).wait_event(record.left)
        record.sources.clear()

    def _packer(self, record: BlockRecord, stay: set[int]) -> Callable[[Tensor], Any]:
        """The hook that autograd calls with each tensor it saves; storages in `stay` are kept."""
        # Addresses are safe as keys: `record.sources` keeps the storages alive during this forward.
        sent: dict[tuple[int, int], OffloadedStorage] = {}

        def pack(tensor: Tensor) -> Any:
            size = tensor.numel() * tensor.element_size()
            if size < self.min_bytes or tensor.device != self.device or _storage(tensor) in stay:
                return tensor
            storage = tensor.untyped_storage()
            if storage.nbytes() > 2 * size:  # a small view of a large storage is copied alone
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                storage = tensor.untyped_storage()
            # The version: a storage that was changed in place between two uses is two contents.
            key = (storage.data_ptr(), tensor._version)
            if key not in sent:
                all_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
                sent[key] = self._send(record, all_bytes)
            return sent[key], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

        return pack

    def _send(self, record: BlockRecord, source: Tensor) -> OffloadedStorage:
        """Start copying the bytes of a storage to the host."""
        host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=self.stream is not None)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._copying():
            host.copy_(source, non_blocking=True)
        moved = OffloadedStorage(record, host)
        record.sources.append(source)
        record.moved.append(ref(moved))
        self.moved_bytes += source.nbytes
        return moved

    def _bring_back(
        self,
        moved: OffloadedStorage,
        dtype: torch.dtype,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
    ) -> Tensor:
        """A view of a restored storage, as autograd saved it. The block below is fetched ahead."""
        record = moved.record
        if self._active is not record:
            if self._active is not None:
                self._drop(self._active)
            self._active = record
        self._fetch(record)
        if record.previous is not None:
            self._fetch(record.previous)
        if record.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(record.arrived)
        assert moved.restored is not None
        return torch.as_strided(moved.restored.view(dtype), size, stride, offset)

    def _fetch(self, record: BlockRecord) -> None:
        """Start bringing back what a block saved, unless that has been done."""
        if record.is_back:
            return
        self._release(record)
        alive = [moved for weak in record.moved if (moved := weak()) is not None]
        for moved in alive:
            moved.restored = torch.empty(moved.host.shape, dtype=torch.uint8, device=self.device)
        # The memory may have held something else that queued work still reads.
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._copying():
            for moved in alive:
                assert moved.restored is not None
                moved.restored.copy_(moved.host, non_blocking=True)
        record.arrived = None
        if self.stream is not None:
            record.arrived = self.stream.record_event()
        record.is_back = True

    @staticmethod
    def _drop(record: BlockRecord) -> None:
        """A block is done: what autograd does not hold itself may go."""
        record.is_back = False
        for weak in record.moved:
            moved = weak()
            if moved is not None:
                moved.restored = None

    def _copying(self) -> AbstractContextManager[object]:
        if self.stream is None:
            return nullcontext()
        return torch.cuda.stream(self.stream)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, in tuples and in fields of dataclasses."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif is_dataclass(value):
            yield from _tensors(getattr(value, field.name) for field in fields(value))

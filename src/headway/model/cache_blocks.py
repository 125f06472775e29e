"""What a sequence holds of a cache: a row of pages for each group of heads, and a block of state.

    BlockTable    position p of a slot is in page row[p // P], at p % P, in every layer of the group
    StateBlocks   block n is the state of slot n; further blocks are snapshots, each by the name of
                  the page it ends at

Heads that store the same positions form a group and share page numbers. There is one group: the
full heads of all layers. State is what is not pages: the rings of windowed and streaming heads, one
row of each layer's tensors per block.

All tensors are allocated once: recorded CUDA graphs keep their addresses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import torch


class BlockTable:
    """The pages of every slot, for one group of heads."""

    def __init__(
        self, slots: int, pages_per_slot: int, page_tokens: int, device: torch.device
    ) -> None:
        self.page_tokens = page_tokens
        # One more slot than there are sequences, for rows of a batch that take no part.
        self.tensor = torch.zeros(slots + 1, pages_per_slot, dtype=torch.int32, device=device)
        """int32 [slots + 1, pages of the longest sequence]: what kernels read."""
        self._rows: list[list[int]] = [[] for _ in range(slots)]
        self._changed: dict[tuple[int, int], int] = {}
        """(slot, index in its row) -> page, for entries that the device does not have yet."""

    def num_pages(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_tokens)

    def pages(self, slot: int) -> Sequence[int]:
        """The pages of one slot, in the order of its positions."""
        return self._rows[slot]

    def append(self, slot: int, pages: Sequence[int]) -> None:
        """Pages for the next positions of a slot."""
        # Collected until `flush`: one copy to the device for all sequences of a step.
        row = self._rows[slot]
        for page in pages:
            self._changed[slot, len(row)] = page
            row.append(page)

    def clear(self, slot: int) -> list[int]:
        """Take all pages from a slot and return them.

        The device keeps their numbers until others replace them.
        """
        pages = self._rows[slot]
        self._rows[slot] = []
        return pages

    @torch.inference_mode()
    def flush(self) -> None:
        """Bring the device up to date, before anything is launched."""
        if not self._changed:
            return
        entries = [(slot, index, page) for (slot, index), page in self._changed.items()]
        self._changed = {}
        columns = torch.tensor(entries, dtype=torch.int64).t()
        slots, indices, pages = to_device(columns, self.tensor.device)
        self.tensor[slots, indices] = pages.int()


class HasState(Protocol):
    """A part of a cache that holds one row of state for each block."""

    def copy_state(self, source: int, target: int) -> None:
        """The state of one block becomes that of another."""
        ...


class StateBlocks:
    """The state of every slot, and snapshots; the least recently used gives way to a new one."""

    def __init__(self, slots: int, snapshots: int, parts: Sequence[HasState]) -> None:
        self._parts = parts
        self._free = list(range(slots, slots + snapshots))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        """Blocks by name, least recently used first."""

    @property
    def num_snapshots(self) -> int:
        """Snapshots that are kept."""
        return len(self._snapshots)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """The state of one block becomes that of another."""
        for part in self._parts:
            part.copy_state(source, target)

    def snapshot(self, slot: int, name: bytes) -> None:
        """Keep the state of a slot under a name, unless that name is kept already or there is no
        room for snapshots at all."""
        if name in self._snapshots:
            self._snapshots.move_to_end(name)
            return
        if self._free:
            block = self._free.pop()
        # The least recently used one gives way: any prefix can be computed again.
        elif self._snapshots:
            _, block = self._snapshots.popitem(last=False)
        else:
            return
        # On the device, in the order of launches: the slot may change right after this call.
        self._snapshots[name] = block
        self.copy(slot, block)

    def last_kept(self, names: Sequence[bytes]) -> int:
        """How many names there are up to the last one that has a snapshot; 0 where none has."""
        # From the end: the longest prefix that can be continued saves most.
        for count in range(len(names), 0, -1):
            if names[count - 1] in self._snapshots:
                self._snapshots.move_to_end(names[count - 1])
                return count
        return 0

    def restore(self, name: bytes, slot: int) -> None:
        """A snapshot becomes the state of a slot."""
        self.copy(self._snapshots[name], slot)

    def free(self) -> None:
        """Forget all snapshots."""
        self._free += self._snapshots.values()
        self._snapshots.clear()


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device, without waiting for it."""
    if device.type != "cuda":
        return host
    # Only a copy from pinned memory is asynchronous.
    return host.pin_memory().to(device, non_blocking=True)

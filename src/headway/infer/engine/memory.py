"""Slots and pages of sequences: who gets them, what is shared, and what is kept for later. Bytes are fixed at the start.

budget -> CacheShape (bytes of a page, bytes of one slot's rings) -> slots, pages, snapshots -> PagedCache
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from headway.errors import ConfigError
from headway.infer.engine.request import EngineOptions
from headway.infer.load import LoadedModel
from headway.model.paged_cache import CacheShape, PagedCache

if TYPE_CHECKING:
    from headway.infer.engine.sequence import EngineSequence

CUDA_SHARE, CPU_SHARE = 0.8, 0.25
"""Of the free memory, where no budget is given."""
FEW = 4
"""Requests that should run at once in the smallest budgets."""
SLOTS_PER_SNAPSHOT = 2
"""One snapshot of rings has room for this many slots."""


def build_cache(
    loaded: LoadedModel, options: EngineOptions, context: int, spare: int = 0
) -> PagedCache:
    """A cache within the budget."""
    dtype = loaded.model.head_weight.dtype
    part = loaded.part
    parts = (
        [(loaded.config, loaded.masks)] if part is None else part.heads(loaded.config, loaded.masks)
    )
    shapes = [
        CacheShape(config, masks, context, options.page_tokens, dtype, spare)
        for config, masks in parts
    ]
    shape = shapes[0 if part is None else part.group.rank]
    # Of ranks that share the heads, one may have more full heads than another; all have the same slots and pages.
    ring, page, per_slot = (
        max(one.ring_bytes for one in shapes),
        max(one.page_bytes for one in shapes),
        shape.pages_per_slot,
    )
    slots, kept = options.max_running, 0
    if ring and options.prefix_reuse:
        kept = max(4, slots // SLOTS_PER_SNAPSHOT)
    budget = options.cache_bytes
    if budget is None:
        free = _free_bytes(loaded.device)
        if part is not None:  # ranks on the CPU share its memory
            free = part.least(free if loaded.device.type == "cuda" else free // part.group.size)
        budget = min((slots + kept) * ring + slots * per_slot * page, free)
    if ring and budget < (slots + kept) * ring + slots * per_slot * page:
        # Fewer requests run at once. Rings take a quarter, so that long requests find pages, or what whole contexts need beside them;
        # for a few requests they may take half.
        shares = (
            budget // 4 // ring,
            budget // (ring + per_slot * page),
            min(FEW, budget // 2 // ring),
        )
        room = budget // ring if page == 0 else max(shares)
        slots = min(slots, room - kept) if room > 2 * kept else min(slots, room)
        kept = min(kept, max(0, room - slots))
    pages = (
        slots * per_slot * 2
        if page == 0
        else min((budget - (slots + kept) * ring) // page, slots * per_slot * 2)
    )
    if slots < 1 or pages < 1:
        raise ConfigError(
            f"cache_bytes is {budget}; a page of {shape.page_tokens} positions takes {page} bytes and one request's rings {ring}. "
            f"Give at least {ring + per_slot * page}."
        )
    return PagedCache(
        shape, slots=slots, pages=pages, snapshots=kept, device=loaded.device, needs_state=ring > 0
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    try:
        return int(CPU_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # a system that does not say
        return 4 << 30


class EngineMemory:
    """The slots and pages of running sequences."""

    def __init__(self, cache: PagedCache, *, prefix_reuse: bool) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.table = cache.table
        self.states = cache.states
        self._reuse = prefix_reuse
        self._page_tokens = cache.shape.page_tokens
        self._free_slots = list(range(cache.slots - 1, -1, -1))

    def fits(self, tokens: int) -> bool:
        """A sequence of this length fits when nothing else runs."""
        return self.table.num_pages(tokens) <= self.pool.num_pages

    def bytes_used(self) -> int:
        """Of running sequences and of snapshots."""
        shape = self.cache.shape
        rings = self.cache.slots - len(self._free_slots) + self.states.num_snapshots
        return self.pool.num_used * shape.page_bytes + rings * shape.ring_bytes

    def admit(self, one: EngineSequence, reserve: int) -> bool:
        """Give a slot and the pages of its prompt, the first of them shared where possible; False where there is no room now.

        `reserve`: pages that stay free for the sequences that run."""
        if not self._free_slots:
            return False
        shares = self._reuse and not (one.request.embed or one.request.prompt_logprobs)
        # The last token is always computed: its hidden state gives the next token.
        names = one.page_names(self._page_tokens, one.target - 1) if shares else []
        known = self.pool.match(names)
        shared = known
        if self.cache.needs_state:
            shared = known[: self.states.last_kept(names[: len(known)])]
        for page in shared:
            self.pool.take(page)
        wanted = self.table.num_pages(one.target) - len(shared)
        if wanted + reserve > self.pool.num_available:
            self.pool.release(shared)
            return False
        one.slot = self._free_slots.pop()
        one.computed = len(shared) * self._page_tokens
        one.keep_at = 0
        if len(known) > len(shared):
            # Another sequence has the same beginning: where it ends, a snapshot will be of use.
            one.keep_at = len(known) * self._page_tokens
        self.table.append(one.slot, shared)
        for _ in range(wanted):
            self._add_page(one)
        if self.cache.needs_state and shared:
            self.states.restore(names[len(shared) - 1], one.slot)
        return True

    def may_grow(self, one: EngineSequence) -> bool:
        """It will need another page if it runs to its end."""
        longest = len(one.request.prompt) + one.most
        return self.table.num_pages(longest) > len(self.table.pages(one.slot))

    def holds(self, one: EngineSequence, tokens: int) -> bool:
        """Its pages have room for some tokens."""
        return tokens <= len(self.table.pages(one.slot)) * self._page_tokens

    def grow(self, one: EngineSequence, tokens: int) -> bool:
        """Room for some tokens; False where no page is left."""
        while self.table.num_pages(tokens) > len(self.table.pages(one.slot)):
            if self.pool.num_available == 0:
                return False
            self._add_page(one)
        return True

    def _add_page(self, one: EngineSequence) -> None:
        page = self.pool.allocate()
        self.cache.clear_page(page)
        self.table.append(one.slot, [page])

    def flush(self) -> None:
        """Bring the block table up to date on the device, before anything is launched."""
        self.table.flush()

    def keep(self, one: EngineSequence, length: int) -> None:
        """Name the whole pages of the first `length` tokens, so that others may share them.

        A snapshot of the state at their end is kept with them."""
        if not self._reuse:
            return
        names = one.page_names(self._page_tokens, length)
        for page, name in zip(self.table.pages(one.slot), names, strict=False):
            self.pool.name(page, name)
        if names and self.cache.needs_state:
            self.states.snapshot(one.slot, names[-1])

    def release(self, one: EngineSequence) -> None:
        """Take back the slot and the pages; whole pages are kept for others as long as there is room."""
        if one.slot < 0:
            return
        # A token that was chosen but not fed has no keys; rings can be taken back by a page at most.
        self.keep(one, min(one.computed, len(one.tokens) - 1))
        self.pool.release(self.table.clear(one.slot))
        self._free_slots.append(one.slot)
        one.slot = -1
        one.computed = 0

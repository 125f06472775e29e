"""Slots and pages of sequences: who gets them, what is shared, and what is kept for later. Bytes
are fixed at the start.

budget -> CacheShape (bytes of a page, bytes of one slot's state) -> slots, pages, snapshots ->
PagedCache

slot       a sequence that runs
page       keys and values of `page_tokens` positions, for heads that attend to everything; sequences share pages of a common prefix
ring       keys and values of heads with a window: of the same size for each slot, overwritten as the sequence grows
state      of linear attention: of the same size for each slot, changed by every token
snapshot   a copy of a slot's rings and states at the end of a page, from which another sequence with the same prefix may start
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

CUDA_SHARE = 0.8
CPU_SHARE = 0.25
"""Shares of the free memory that a cache takes, where no budget is given."""
UNKNOWN_FREE_BYTES = 4 << 30
"""Taken where the system does not say how much memory is free."""
MIN_SNAPSHOTS = 4
PAGES_OVER_NEED = 2
"""At most this many times the pages that all slots need at full length: what is over keeps prefixes
for later."""
FEW = 4
"""Requests that should run at once in the smallest budgets."""
SLOTS_PER_SNAPSHOT = 2
"""There is one snapshot for this many slots."""


def build_cache(
    loaded: LoadedModel, options: EngineOptions, context: int, spare: int = 0
) -> PagedCache:
    """A cache within the budget. `context`: tokens of the longest sequence. `spare`: positions that
    speculation may take back."""
    dtype = loaded.model.head_weight.dtype
    # Where several ranks share the layers, each has some of the heads.
    part = loaded.part
    if part is None:
        heads_by_rank = [(loaded.config, loaded.masks)]
        rank = 0
    else:
        heads_by_rank = part.heads(loaded.config, loaded.masks)
        rank = part.group.rank
    shapes = [
        CacheShape(
            config, masks, context, options.page_tokens, dtype, spare, options.exact, options.routes
        )
        for config, masks in heads_by_rank
    ]
    shape = shapes[rank]
    # A rank may have more full heads than another. All must have the same slots and pages, so the
    # largest sizes count.
    state_bytes = max(rank_shape.state_bytes for rank_shape in shapes)
    page_bytes = max(rank_shape.page_bytes for rank_shape in shapes)

    # What is wanted: state of sequences that run, and of snapshots that let others start from a
    # shared prefix.
    slots = options.max_running
    snapshots = 0
    if state_bytes and options.prefix_reuse:
        snapshots = max(MIN_SNAPSHOTS, slots // SLOTS_PER_SNAPSHOT)
    slot_page_bytes = shape.pages_per_slot * page_bytes
    wanted_bytes = (slots + snapshots) * state_bytes + slots * slot_page_bytes

    idle_bytes = max(rank_shape.idle_bytes for rank_shape in shapes)
    budget = options.cache_bytes
    if budget is None:
        free = _free_bytes(loaded.device)
        if part is not None:
            if loaded.device.type != "cuda":
                free //= part.group.size  # ranks on the CPU share its memory
            free = part.least(free)
        budget = min(wanted_bytes + idle_bytes, free)
    budget = max(0, budget - idle_bytes)

    if state_bytes and budget < wanted_bytes:
        # Fewer requests run at once. The number of rings is the largest of three:
        # - a quarter of the budget in rings, which leaves pages for long requests;
        # - as many as can all have the pages of a whole context;
        # - a few requests, whose rings may take half of the budget.
        num_rings = max(
            budget // 4 // state_bytes,
            budget // (state_bytes + slot_page_bytes),
            min(FEW, budget // 2 // state_bytes),
        )
        if page_bytes == 0:
            # every head has a ring
            num_rings = budget // state_bytes
        # Requests that run come before snapshots, unless there is room for plenty of both.
        if num_rings > 2 * snapshots:
            slots = min(slots, num_rings - snapshots)
        else:
            slots = min(slots, num_rings)
        snapshots = min(snapshots, max(0, num_rings - slots))

    pages = slots * shape.pages_per_slot * PAGES_OVER_NEED
    if page_bytes > 0:
        pages = min((budget - (slots + snapshots) * state_bytes) // page_bytes, pages)
    if slots < 1 or pages < 1:
        raise ConfigError(
            f"cache_bytes is {budget + idle_bytes}; a page of {shape.page_tokens} positions takes {page_bytes} "
            "bytes and one request's state "
            f"{state_bytes}. Give at least {state_bytes + slot_page_bytes + idle_bytes}."
        )
    return PagedCache(
        shape,
        slots=slots,
        pages=pages,
        snapshots=snapshots,
        device=loaded.device,
        needs_state=state_bytes > 0,
    )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    try:
        return int(CPU_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return UNKNOWN_FREE_BYTES


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
        return self.pool.num_used * shape.page_bytes + rings * shape.state_bytes

    def admit(self, sequence: EngineSequence, reserve: int) -> bool:
        """Give a slot and the pages of its prompt, the first of them shared where possible; False
        where there is no room now.

        `reserve`: pages that stay free for the sequences that run."""
        if not self._free_slots:
            return False
        # Embeddings and log-probabilities of a prompt need the hidden states of all its tokens.
        needs_all_states = sequence.request.embed or sequence.request.prompt_logprobs
        names = []
        if self._reuse and not needs_all_states:
            # The last token is always computed: its hidden state gives the next token.
            names = sequence.page_names(self._page_tokens, sequence.target - 1)
        # Pages alone are of no use to heads with rings: sharing ends where a snapshot of these was
        # kept.
        known = self.pool.match(names)
        shared = known
        if self.cache.needs_state:
            shared = known[: self.states.last_kept(names[: len(known)])]

        # Taken before anything is allocated: a free page that only keeps a prefix may be given
        # away.
        for page in shared:
            self.pool.take(page)
        wanted = self.table.num_pages(sequence.target) - len(shared)
        if wanted + reserve > self.pool.num_available:
            self.pool.release(shared)
            return False
        sequence.slot = self._free_slots.pop()
        sequence.computed = len(shared) * self._page_tokens
        sequence.keep_at = self._kept_places(sequence, len(shared), len(known))
        self.table.append(sequence.slot, shared)
        for _ in range(wanted):
            self._add_page(sequence)
        if self.cache.needs_state and shared:
            self.states.restore(names[len(shared) - 1], sequence.slot)
        return True

    def _kept_places(self, sequence: EngineSequence, shared: int, known: int) -> tuple[int, ...]:
        """Where snapshots are wanted while the prompt is read behind its first `shared` pages; pages
        up to `known` are those of another sequence."""
        places: set[int] = set()
        if known > shared:
            # Another sequence has the same beginning: where it ends, a snapshot will be of use.
            places.add(known)
        if self.cache.shape.has_states and self._reuse:
            # A state behind the whole prompt is of no use to a request that shares all of it but
            # the last token: it must be kept on the way.
            places.add((sequence.target - 1) // self._page_tokens)
        return tuple(page * self._page_tokens for page in sorted(places) if page > shared)

    def may_grow(self, sequence: EngineSequence) -> bool:
        """It will need another page if it runs to its end."""
        longest = len(sequence.request.prompt) + sequence.max_generated
        return self.table.num_pages(longest) > len(self.table.pages(sequence.slot))

    def holds(self, sequence: EngineSequence, tokens: int) -> bool:
        """Its pages have room for some tokens."""
        return tokens <= len(self.table.pages(sequence.slot)) * self._page_tokens

    def grow(self, sequence: EngineSequence, tokens: int) -> bool:
        """Room for some tokens; False where no page is left."""
        while self.table.num_pages(tokens) > len(self.table.pages(sequence.slot)):
            if self.pool.num_available == 0:
                return False
            self._add_page(sequence)
        return True

    def _add_page(self, sequence: EngineSequence) -> None:
        page = self.pool.allocate()
        self.cache.clear_page(page)
        self.table.append(sequence.slot, [page])

    def flush(self) -> None:
        """Bring the block table up to date on the device, before anything is launched."""
        self.table.flush()

    def keep(self, sequence: EngineSequence, length: int) -> None:
        """Name the whole pages of the first `length` tokens, so that others may share them.

        A snapshot of the state at their end is kept with them."""
        if not self._reuse:
            return
        names = sequence.page_names(self._page_tokens, length)
        for page, name in zip(self.table.pages(sequence.slot), names, strict=False):
            self.pool.name(page, name)
        # Rings serve a little behind the page's end too, states stand at one token alone.
        at_end = len(names) * self._page_tokens == sequence.computed
        if names and self.cache.needs_state and (at_end or not self.cache.shape.has_states):
            self.states.snapshot(sequence.slot, names[-1])

    def release(self, sequence: EngineSequence) -> None:
        """Take back the slot and the pages; whole pages are kept for others as long as there is
        room."""
        if sequence.slot < 0:
            return
        # A token that was chosen but not fed has no keys. The rings are at the last token, the name
        # is that of the last whole page, less than a page before: rings hold a page more than their
        # window, so the snapshot serves there.
        self.keep(sequence, min(sequence.computed, len(sequence.tokens) - 1))
        self.pool.release(self.table.clear(sequence.slot))
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.computed = 0

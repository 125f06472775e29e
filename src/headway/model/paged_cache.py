"""Keys and values of many sequences within a fixed number of bytes: pages for heads that keep every
position, rings for heads that forget.

A sequence that runs has a slot. Position p of a slot is stored, in each layer,

    full heads                 in a page of the slot's row in the block table; the same page number in
                               every layer
    streaming, windowed heads  in the slot's ring: S sinks, then the last W positions and some more, so
                               that a few can be taken back
    layers with a state        nowhere: the slot has one of fixed size (state_layer.py)

Pages may be shared by sequences with the same beginning (`PagePool`); rings and states are state, of
which snapshots are kept (`StateBlocks`). All memory is allocated at the start.

    PagedCache    memory, block table, state, lengths; decode and prefill batches are made from it
    PagedDecode   one token in each row of a batch of slots
    PagedPrefill  pieces of several prompts, packed in one row

Both batches are what a model sees of the cache (`AttentionCache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headway.kernels.paged_attention import PagedWorkspace
from headway.model.base import Expander
from headway.model.cache_blocks import BlockTable, StateBlocks, to_device
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks
from headway.model.page_pool import PagePool
from headway.model.paged_layer import LayerPages, PrefillPiece, PrefillPlan, RingHeads
from headway.model.state_layer import LayerState, state_bytes

if TYPE_CHECKING:
    from headway.model.state_mixer import StateMixer

ROUTE_DTYPE = torch.int16
"""Of numbers of experts (MAX_EXPERTS fits)."""


@dataclass(frozen=True)
class CacheShape:
    """What a cache has room for, and the bytes of its parts."""

    config: ModelConfig
    masks: HeadMasks | None
    context: int
    """Tokens of the longest sequence."""
    page_tokens: int
    dtype: torch.dtype
    spare: int = 0
    """Positions that can be taken back from rings; at least one page's."""
    is_exact: bool = False
    """Attention in bits that depend on a token and those before it alone (model/exact.py)."""
    keeps_routes: bool = False
    """The experts of every position are stored beside its keys and values."""

    def groups(self, layer: int) -> tuple[tuple[int, ...], list[RingHeads]]:
        """The full heads of a layer, and its rings; every KV head is in one of them. A layer with a
        state has neither."""
        if self.config.has_state(layer):
            return (), []
        full: list[int] = []
        rings: dict[tuple[int, int, int | None], list[int]] = {}
        for head in range(self.config.cached_heads):
            view = self._limited_view(layer, head)
            if view is None:
                full.append(head)
            else:
                rings.setdefault(view, []).append(head)

        spare = max(self.spare, self.page_tokens)
        return tuple(full), [
            RingHeads(tuple(heads), sinks, window + spare, window, reach)
            for (sinks, window, reach), heads in rings.items()
        ]

    def _limited_view(self, layer: int, head: int) -> tuple[int, int, int | None] | None:
        """(sinks, window, reach of the sinks) of a head; None if it sees every position of the
        longest sequence."""
        layer_window = self.config.window_of(layer)
        if layer_window is not None and layer_window >= self.context:
            layer_window = None
        layer_view = None
        if layer_window is not None:
            layer_view = (0, layer_window, None)
        if self.masks is None or self.masks.full[layer][head]:
            return layer_view

        window = DEFAULT_WINDOW if self.masks.window is None else self.masks.window
        sinks = DEFAULT_SINKS if self.masks.sinks is None else self.masks.sinks
        # Streaming that would not see less than the layer allows anyway.
        if layer_window is not None and layer_window <= window:
            return layer_view
        if sinks + window >= self.context:
            return layer_view
        # A sink is seen no farther than the window of the layer.
        return sinks, window, layer_window

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        heads = sum(len(self.groups(layer)[0]) for layer in range(self.config.num_layers))
        layers, experts = self.routes
        routes = layers * experts * ROUTE_DTYPE.itemsize
        return self.page_tokens * (heads * self._entry_bytes + routes)

    @property
    def routes(self) -> tuple[int, int]:
        """(layers with a mixture, experts of a token) that are stored; (0, 0) without routes."""
        experts = self.config.experts
        if experts is None or not self.keeps_routes:
            return 0, 0
        layers = sum(map(self.config.is_mixture, range(self.config.num_layers)))
        return layers, experts.per_token

    @property
    def state_bytes(self) -> int:
        """Bytes of what one slot has besides pages, in all layers: rings, and states of
        layers."""
        entries = 0
        states = 0
        for layer in range(self.config.num_layers):
            _, rings = self.groups(layer)
            entries += sum(len(ring.heads) * ring.indices for ring in rings)
            if self.config.has_state(layer):
                states += state_bytes(self.config.state_shape, self.dtype)
        return entries * self._entry_bytes + states

    @property
    def idle_bytes(self) -> int:
        """Bytes of the state for rows of a batch that take no part."""
        if not self.config.has_states:
            return 0
        layers = sum(map(self.config.has_state, range(self.config.num_layers)))
        return layers * state_bytes(self.config.state_shape, self.dtype)

    @property
    def has_states(self) -> bool:
        """Whether layers have a state, which stands behind a slot's last token and, unlike rings, cannot
        go back."""
        return self.config.has_states

    @property
    def _entry_bytes(self) -> int:
        """Bytes of a position of one head."""
        # With latent attention the stored vector is key and value in one.
        vectors = 1 if self.config.latent_attention is not None else 2
        return vectors * self.config.cached_size * self.dtype.itemsize

    @property
    def pages_per_slot(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context // self.page_tokens)


class PagedCache:
    """Slots, pages and rings of one model, all allocated at the start."""

    def __init__(
        self,
        shape: CacheShape,
        *,
        slots: int,
        pages: int,
        snapshots: int,
        device: torch.device,
        needs_state: bool | None = None,
    ) -> None:
        """`needs_state`: a prefix can be continued only from one of the `snapshots`; None: if the
        shape has state.

        A rank whose own heads have no rings needs it if other ranks' heads have some: all ranks
        must agree on which prefixes can be continued.
        """
        if shape.masks is not None:
            shape.masks.check(shape.config)
        self.shape = shape
        self.slots = slots
        self.device = device
        if needs_state is None:
            needs_state = shape.state_bytes > 0
        self.needs_state = needs_state

        self.pool = PagePool(pages)
        self.table = BlockTable(slots, shape.pages_per_slot, shape.page_tokens, device)
        blocks = slots + snapshots if needs_state else 0
        self.layers: dict[int, LayerPages] = {}
        self.layer_states: dict[int, LayerState] = {}
        """Of layers that have a state, by number as those with pages."""
        for layer in range(shape.config.num_layers):
            if shape.config.has_state(layer):
                self.layer_states[layer] = LayerState(
                    shape.config.state_shape, slots, blocks, device, shape.dtype
                )
                continue
            full, rings = shape.groups(layer)
            self.layers[layer] = LayerPages(
                shape.config,
                full,
                rings,
                self.table,
                (pages, blocks),
                device,
                shape.dtype,
                is_exact=shape.is_exact,
            )
        self.states = StateBlocks(
            slots, snapshots, [*self.layers.values(), *self.layer_states.values()]
        )
        # One more page than there are: rows of a batch that take no part write there.
        self.routes = torch.zeros(
            pages + 1, shape.page_tokens, *shape.routes, dtype=ROUTE_DTYPE, device=device
        )
        """[pages + 1, P, layers, k]: the experts of every position."""

        # One more slot than there are sequences, for rows of a batch that take no part: its length
        # stays -1.
        self.lengths = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.lengths[slots] = -1
        self.workspace = PagedWorkspace(device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys, values and states it has room for."""
        parts = [*self.layers.values(), *self.layer_states.values()]
        return sum(part.num_bytes for part in parts)

    def forget_all(self) -> None:
        """Give back every page without users and every snapshot."""
        self.pool.forget_all()
        self.states.free()

    @torch.inference_mode()
    def clear_page(self, page: int) -> None:
        """Zero a page before another sequence uses it: not even a NaN of one sequence reaches
        the next."""
        # CUDA kernels read only positions that are written. The plain path reads whole pages, and
        # gives the rest a weight of 0, which a NaN would survive.
        if self.device.type != "cuda":
            for layer in self.layers.values():
                for pool in layer.pages():
                    pool[page] = 0

    @torch.inference_mode()
    def set_length(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Say how many tokens these slots hold."""
        # One copy to the device for both.
        rows, values = to_device(torch.tensor([list(slots), list(lengths)]), self.device)
        self.lengths[rows] = values

    @torch.inference_mode()
    def routes_of(self, slot: int, length: int) -> np.ndarray[Any, np.dtype[np.int16]]:
        """The experts of the first `length` tokens of a slot, [length, layers, k]; waits for the
        device."""
        pages = torch.tensor(self.table.pages(slot)[: self.table.num_pages(length)])
        stored = self.routes[to_device(pages, self.device)]
        return stored.flatten(0, 1)[:length].cpu().numpy()

    def decode_batch(self, rows: int) -> PagedDecode:
        """A decoding batch of `rows` slots; its caller fills in which."""
        return PagedDecode(self, rows)

    def prefill_batch(self, pieces: Sequence[PrefillPiece]) -> PagedPrefill:
        """Pieces of several prompts, whose slots already have their pages."""
        return PagedPrefill(self, PrefillPlan.of(pieces, self.device))


class PagedDecode:
    """One token in each row."""

    def __init__(self, cache: PagedCache, rows: int) -> None:
        self.cache = cache
        self.rows = rows
        self.slots = torch.full((rows,), cache.slots, dtype=torch.int64, device=cache.device)
        """int64 [B]: the slot of each row; rows that take no part have the last slot, which no
        sequence uses."""
        self.capacity = cache.shape.context
        self.host_slots: list[int] = []
        """`slots` as the host knows them."""
        self.most = 0
        """No row has more tokens than this, the new one included; for the plain path."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        sinks: torch.Tensor | None = None,
        expand: Expander | None = None,
    ) -> torch.Tensor:
        """o [B,1,H,hd] of q [B,1,H,hd] at positions [B,1]; k and v [B,1,KV,hd] are stored."""
        assert expand is None, "single steps attend to what is stored"
        return self.cache.layers[layer].step(q, k, v, position[:, 0], self, sinks)

    def store_routes(self, routes: torch.Tensor, position: torch.Tensor) -> None:
        """Store the experts [B,1,layers,k] of tokens at positions [B,1]."""
        cache = self.cache
        places = position[:, 0]
        pages = cache.table.tensor[self.slots, places // cache.shape.page_tokens].long()
        pages = pages.where(places >= 0, len(cache.routes) - 1)
        cache.routes[pages, places % cache.shape.page_tokens] = routes[:, 0].to(ROUTE_DTYPE)

    def mix(
        self,
        layer: int,
        mixer: StateMixer,
        mixed: torch.Tensor,
        controls: torch.Tensor,
        z: torch.Tensor,
    ) -> torch.Tensor:
        """o [B,1,H,V] of one token of each row behind its state, which continues with it."""
        return self.cache.layer_states[layer].step(mixer, mixed, controls, z, self.slots)


class PagedPrefill:
    """Pieces of prompts, packed in one row."""

    def __init__(self, cache: PagedCache, plan: PrefillPlan) -> None:
        self.cache = cache
        self.plan = plan
        self.capacity = cache.shape.context

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        sinks: torch.Tensor | None = None,
        expand: Expander | None = None,
    ) -> torch.Tensor:
        """o [1,N,H,hd] of q [1,N,H,hd]; each piece sees what its slot holds and itself; k and v
        [1,N,KV,hd] are stored."""
        return self.cache.layers[layer].prefill(q[0], k[0], v[0], self.plan, sinks, expand)[None]

    def store_routes(self, routes: torch.Tensor, position: torch.Tensor) -> None:
        """Store the experts [1,N,layers,k] of the pieces' tokens."""
        places = self.plan.places(self.cache.table)
        self.cache.routes[places.page, places.offset] = routes[0].to(ROUTE_DTYPE)

    def mix(
        self,
        layer: int,
        mixer: StateMixer,
        mixed: torch.Tensor,
        controls: torch.Tensor,
        z: torch.Tensor,
    ) -> torch.Tensor:
        """o [1,N,H,V] of each piece behind the state of its slot, which continues with it."""
        state = self.cache.layer_states[layer]
        return state.prefill(mixer, mixed, controls, z, self.plan.pieces, self.plan.segments)

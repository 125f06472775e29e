"""Rows of equal length through a paged cache without an inference engine: to score texts under head
masks, and to check a checkpoint.

    rows = PagedRows(model, 2, 20)
    rows.read(tokens[:, :9])       -> hidden states [2,9,D]
    rows.read(tokens[:, 9:15])     -> [2,6,D], behind the first nine
    rows.step(tokens[:, 15])       -> [2,D], one token in each row

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

import torch

from headway.model.base import Model
from headway.model.head_masks.masks import HeadMasks
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.paged_layer import PrefillPiece
from headway.model.projector import MediaTensors

PAGE_TOKENS = 64
"""Positions of a page. Every row has all its pages from the start, so the size hardly matters
here."""


class PagedRows:
    """Sequences that all have the same length, each in its own slot."""

    def __init__(
        self, model: Model, rows: int, capacity: int, *, masks: HeadMasks | None = None
    ) -> None:
        """`capacity`: tokens that a row will have at most."""
        weight = model.head_weight
        shape = CacheShape(model.config, masks, capacity, PAGE_TOKENS, weight.dtype)
        pages_per_row = shape.pages_per_slot
        self.cache = PagedCache(
            shape, slots=rows, pages=rows * pages_per_row, snapshots=0, device=weight.device
        )
        self.length = 0
        """Tokens that each row holds."""
        self._forward = model.cached_forward()

        for row in range(rows):
            self.cache.table.append(row, range(row * pages_per_row, (row + 1) * pages_per_row))
        self.cache.table.flush()

        self._steps = self.cache.decode_batch(rows)
        self._steps.slots.copy_(torch.arange(rows))

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor, media: MediaTensors | None = None) -> torch.Tensor:
        """Hidden states [B,T,D] of tokens [B,T] behind those that the rows hold.

        `media`: of a single row alone.
        """
        rows, count = tokens.shape
        assert media is None or rows == 1, "media of several rows would have to be packed"

        # All rows are packed into one, [1, B * T], as pieces of prompts are in an engine.
        pieces = [PrefillPiece(row, self.length, count) for row in range(rows)]
        position = torch.arange(self.length, self.length + count, device=tokens.device)
        hidden = self._forward(
            tokens.reshape(1, -1),
            position.repeat(rows)[None],
            self.cache.prefill_batch(pieces),
            media,
        )
        self.length += count
        return hidden.view(rows, count, -1)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states [B,D] after one more token [B] in each row."""
        # All rows have one length, so they are at one position.
        position = torch.full_like(tokens, self.length)
        self.length += 1
        self._steps.most = self.length
        return self._forward(tokens[:, None], position[:, None], self._steps)[:, 0]

"""Soft-capped attention on CUDA: torch's flex_attention, compiled, which computes cap * tanh(score
/ cap) inside its kernels.

q [B,T,H,hd], k and v [B,T,KV,hd] come in, o [B,T,H,hd] goes out. Blocks of 128 x 128 tokens that no
document and no window reaches are skipped, so work grows with the documents and windows, not with T
* T. All layers of a pass with the same window share one block mask.

A length that is no multiple of a block is padded to the next power of two: so prompts of any length
need few compiled kernels. The padding comes last, where nothing sees it. Heads narrower than the
kernels take (`MIN_HEAD_DIM`) get zeros behind them, which add nothing to a score; the scale stays
that of the real width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.attention import AttentionMask

BLOCK = 128
"""Tokens along either side of a block that is computed or skipped as a whole."""
MIN_HEAD_DIM = 16
"""flex_attention has no kernel for narrower heads."""


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, window: int | None, softcap: float | None
) -> Tensor:
    """Attention inside documents with soft-capped scores."""
    length = q.shape[1]
    padded = padded_length(length)
    seen = mask.blocks.get(window)
    if seen is None:
        seen = mask.blocks[window] = _block_mask(mask.document, padded, window)
    head_dim = q.shape[3]
    missing_width = max(0, MIN_HEAD_DIM - head_dim)
    if padded > length or missing_width > 0:
        padding = (0, missing_width, 0, 0, 0, padded - length)
        q = F.pad(q, padding)
        k = F.pad(k, padding)
        v = F.pad(v, padding)
    o = _kernel()(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=None if softcap is None else _capping(softcap),
        block_mask=seen,
        scale=head_dim**-0.5,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)[:, :length, :, :head_dim]


def padded_length(length: int) -> int:
    """The length that is computed instead: a multiple of BLOCK, or the next power of two."""
    if length % BLOCK == 0:
        return length
    return max(BLOCK, 1 << (length - 1).bit_length())


@cache
def _capping(softcap: float) -> Callable[..., Tensor]:
    """One function per cap: a new one would be compiled again."""

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _block_mask(document: Tensor, length: int, window: int | None) -> Any:
    # Padding is a document of its own, -1, which no real token belongs to.
    document = F.pad(document, (0, length - document.shape[1]), value=-1)
    reach = length if window is None else window

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[row, query] == document[row, key]) & (query >= key) & (query - key < reach)

    return _maker()(
        visible, document.shape[0], None, length, length, device=document.device, BLOCK_SIZE=BLOCK
    )


@cache
def _maker() -> Callable[..., Any]:
    """Compiled, it never holds the mask of single tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)


@cache
def _kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel for each padded length, of which there are few.
    return torch.compile(flex_attention, dynamic=False)

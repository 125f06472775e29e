"""Merging pieces of attention on CUDA: one pass over the queries of a piece, outputs and log-sum-exps changed in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

ROWS = 32
"""Queries of one program."""


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def merge(
        o, o_token, o_head, lse, lse_head, part, p_token, p_head, part_lse, places, first, count,
        LISTED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip  # pyright: ignore
        head = tl.program_id(1).to(tl.int64)
        row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = row < count
        if LISTED:
            place = tl.load(places + row, mask=inside, other=0)
        else:
            place = first + row
        before = tl.load(lse + head * lse_head + place, mask=inside, other=0.0)
        new = tl.load(part_lse + head * count + row, mask=inside, other=0.0)
        highest = tl.maximum(before, new)
        after = highest + tl.log(tl.exp(before - highest) + tl.exp(new - highest))
        tl.store(lse + head * lse_head + place, after, mask=inside)
        lane = tl.arange(0, PADDED)
        here = inside[:, None] & (lane < WIDTH)[None, :]
        to = o + place[:, None] * o_token + head * o_head + lane[None, :]
        old = tl.load(to, mask=here, other=0.0).to(tl.float32)
        add = tl.load(part + row[:, None] * p_token + head * p_head + lane[None, :], mask=here, other=0.0).to(tl.float32)
        mixed = old * tl.exp(before - after)[:, None] + add * tl.exp(new - after)[:, None]
        tl.store(to, mixed.to(o.dtype.element_ty), mask=here)

    return merge


def merge_cuda(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, at: slice | Tensor) -> None:
    """As `merge_reference` in streaming_pieces.py, in one kernel."""
    count, heads, width = part.shape
    part_lse = part_lse.contiguous()
    places = at if isinstance(at, Tensor) else torch.empty(0, dtype=torch.int64, device=o.device)
    _kernel()[(-(-count // ROWS), heads)](
        o, o.stride(0), o.stride(1), lse, lse.stride(0), part, part.stride(0), part.stride(1), part_lse, places,
        at.start if isinstance(at, slice) else 0, count,
        LISTED=isinstance(at, Tensor), WIDTH=width, PADDED=1 << (width - 1).bit_length(), BLOCK=ROWS,
    )  # fmt: skip

"""Several new tokens against everything before them: q of a chunk and all keys up to its end come in, o goes out.

Shapes: B rows, T new tokens, S tokens in all, H query heads, KV key and value heads, hd head width.

    keys      0 . . . . . . . . S-1          query t of a row at position p sees keys 0..p
    queries               0 . . T-1
"""

from __future__ import annotations

import torch

from headway.kernels.attention import dense, varlen_kernel, why_not

QUERY_BLOCK = 1024
"""Queries that share one dense mask."""


def attend_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, start: int | None, position: torch.Tensor) -> torch.Tensor:
    """o [B,T,H,hd] of q [B,T,H,hd] at positions [B,T] and k, v [B,S,KV,hd]; `start` where every row's chunk begins there and ends at S."""
    if start is not None and not why_not("varlen", q.device.type, q.dtype, q.shape[-1]):
        return _flash(q, k, v)
    slot = torch.arange(k.shape[1], device=q.device)
    blocks: list[torch.Tensor] = []
    for begin in range(0, q.shape[1], QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, q.shape[1])
        stop = k.shape[1] if start is None else start + end
        seen = slot[:stop] <= position[:, begin:end, None]
        blocks.append(dense(q[:, begin:end], k[:, :stop], v[:, :stop], seen))
    return torch.cat(blocks, dim=1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One call per row: a row's keys are one stretch of the cache, all rows' are not, and packing them would copy the whole past."""
    kernel = varlen_kernel(q.shape[2] != k.shape[2])
    tokens, total = q.shape[1], k.shape[1]
    of_queries, of_keys = (torch.tensor([0, length], dtype=torch.int32, device=q.device) for length in (tokens, total))
    o = torch.empty_like(q)
    for row in range(q.shape[0]):
        # Where there are more keys than queries the causal edge ends at the last of both.
        o[row] = kernel(q[row], k[row], v[row], of_queries, of_keys, tokens, total, window_size=(-1, 0))
    return o

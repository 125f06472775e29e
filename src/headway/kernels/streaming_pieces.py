"""Streaming attention as FlashAttention calls over packed tokens, merged by their log-sum-exp.

For each document of n tokens, window w, sinks s:

    piece     queries              keys               visible
    window    all                  all                the last w up to the query
    corner    w .. w+s-1           0 .. s-1           key <= query - w: the sinks that have left the window, a triangle
    sinks     w+s .. n-1           0 .. s-1           all

The pieces of one query are disjoint, so with lse = log(sum of exp(lse_p)) the output is sum of o_p * exp(lse_p - lse). Backward runs
FlashAttention's backward on each piece with the merged output and lse: the weight it computes again, exp(score - lse), is then that of the
whole. Long ranges of queries are split into segments, each with its own copy of the sinks (a few rows), so that the gradient of the sinks
is not computed by one block alone.

Without CUDA the calls are plain torch over the same pieces: slow, and what tests compare.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.attention import AttentionMask

SEGMENT = 4096
"""Queries that share one copy of the sinks."""
ROWS = 32
"""Queries of one program."""


@dataclass(frozen=True)
class AttentionPiece:
    """Some queries against some keys, as packed sequences."""

    queries: slice | Tensor
    """Where they are among the flattened tokens: a slice, or int64 indices."""
    keys: Tensor
    """int64: the same for keys; a sink may occur several times."""
    sinks: Tensor
    """int64: the keys without repeats."""
    copy_of: Tensor
    """int64: which of `sinks` each of `keys` is."""
    starts_q: Tensor
    """int32: where each sequence of queries begins, and the end"""
    starts_k: Tensor
    longest_q: int
    longest_k: int
    right: int
    """0 = causal (as many keys as queries), -1 = every key is visible."""


@dataclass(frozen=True)
class StreamPlan:
    """The pieces of one mask, window and sinks."""

    bounds: Tensor
    window: int
    pieces: tuple[AttentionPiece, ...]
    """All pieces except the window."""


def plan_pieces(mask: AttentionMask, window: int, sinks: int) -> StreamPlan:
    """Find the queries that see sinks outside their window. Works on the host; the device does not wait where the mask knows its bounds."""
    length = mask.document.shape[1]
    corner: list[tuple[int, int, int]] = []
    beyond: list[tuple[int, int, int]] = []
    for row, bounds in enumerate(mask.on_host()):
        for start, stop in itertools.pairwise(bounds):
            begin, size = row * length + start, stop - start
            if sinks and size > window:
                many = min(size - window, sinks)
                corner.append((begin, window, many))
                beyond += [
                    (begin, first, min(SEGMENT, size - first))
                    for first in range(window + sinks, size, SEGMENT)
                ]
    device = mask.bounds.device
    pieces = [_piece(corner, None, device), _piece(beyond, sinks, device)]
    return StreamPlan(mask.bounds, window, tuple(piece for piece in pieces if piece is not None))


def _piece(
    ranges: list[tuple[int, int, int]], sinks: int | None, device: torch.device
) -> AttentionPiece | None:
    """Ranges (document start, first query, queries) as one piece; without `sinks`, as many keys as queries and causal."""
    if not ranges:
        return None
    spans = [(begin + first, begin + first + many) for begin, first, many in ranges]
    counts = [many for _, _, many in ranges]
    widths = counts if sinks is None else [sinks] * len(ranges)
    joined = all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    queries = slice(spans[0][0], spans[-1][1]) if joined else _moved(_places(spans), device)
    keys = _places(
        (begin, begin + width) for (begin, _, _), width in zip(ranges, widths, strict=True)
    )
    unique, copy_of = torch.unique(keys, return_inverse=True)
    return AttentionPiece(
        queries, _moved(keys, device), _moved(unique, device), _moved(copy_of, device),
        _starts(counts, device), _starts(widths, device), max(counts), max(widths), 0 if sinks is None else -1,
    )  # fmt: skip


def _places(spans: Iterable[tuple[int, int]]) -> Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in spans])


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return _moved(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def stream_pieces(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: StreamPlan) -> Tensor:
    """o [B,T,H,hd] of q [B,T,H,hd], k and v [B,T,KV,hd]."""
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return _Stream.apply(*flat, mask, plan).view(q.shape)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: StreamPlan
    ) -> Tensor:
        starts, longest = mask.cu_seqlens, mask.max_length
        o, lse = flash(q, k, v, starts, starts, longest, longest, plan.window - 1, 0)
        for piece in plan.pieces:
            part, part_lse = flash(
                _take(q, piece.queries), *_sinks(k, v, piece), *_shape(piece), -1, piece.right
            )
            merge(o, lse, part, part_lse, piece.queries)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask, ctx.plan = mask, plan
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        plan: StreamPlan = ctx.plan
        starts, longest = ctx.mask.cu_seqlens, ctx.mask.max_length
        do = grads[0].contiguous()
        dq, dk, dv = flash_backward(
            do, q, k, v, o, lse, starts, starts, longest, longest, plan.window - 1, 0
        )
        for piece in plan.pieces:
            at = piece.queries
            part_lse = (
                lse[:, at] if isinstance(at, slice) else lse.index_select(1, at)
            ).contiguous()
            given = (_take(do, at), _take(q, at), *_sinks(k, v, piece), _take(o, at), part_lse)
            part_q, part_k, part_v = flash_backward(*given, *_shape(piece), -1, piece.right)
            if isinstance(at, slice):
                dq[at] += part_q
            else:
                dq.index_add_(0, at, part_q)
            for total, part in ((dk, part_k), (dv, part_v)):
                sums = torch.zeros(
                    len(piece.sinks), *part.shape[1:], dtype=torch.float32, device=part.device
                )
                sums.index_add_(0, piece.copy_of, part.float())
                total.index_copy_(
                    0,
                    piece.sinks,
                    (total.index_select(0, piece.sinks).float() + sums).to(total.dtype),
                )
        return dq, dk, dv, None, None


def _shape(piece: AttentionPiece) -> tuple[Tensor, Tensor, int, int]:
    return piece.starts_q, piece.starts_k, piece.longest_q, piece.longest_k


def _sinks(k: Tensor, v: Tensor, piece: AttentionPiece) -> tuple[Tensor, Tensor]:
    return k.index_select(0, piece.keys), v.index_select(0, piece.keys)


def _take(x: Tensor, at: slice | Tensor) -> Tensor:
    return x[at] if isinstance(at, slice) else x.index_select(0, at)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """(o [T,H,hd], lse [H,T]) of packed sequences; key b is visible to query a iff -left <= b - a - (keys - queries) <= right, -1 = any."""
    if not q.is_cuda:
        return _plain(q, k, v, starts_q, starts_k, left, right)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, longest_q, longest_k, 0.0, left == -1 and right == 0, False,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return o, lse


def flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int, left: int, right: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v of packed sequences, where o and lse may be those of a larger whole."""
    if not q.is_cuda:
        return _plain_backward(do, q, k, v, o, lse, starts_q, starts_k, left, right)
    unused = torch.empty(0, device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        do, q, k, v, o, lse, starts_q, starts_k, longest_q, longest_k, 0.0, left == -1 and right == 0, state, unused,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, at: slice | Tensor) -> None:
    """Bring a piece into the whole, in place: o [T,H,hd] and lse [H,T] at the queries of part [t,H,hd] and part_lse [H,t]."""
    if o.is_cuda:
        merge_cuda(o, lse, part, part_lse, at)
    else:
        merge_reference(o, lse, part, part_lse, at)


def merge_reference(
    o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, at: slice | Tensor
) -> None:
    """Plain torch; what the fused kernel is compared to."""
    before = lse[:, at]
    after = torch.logaddexp(before, part_lse)
    old, new = ((x - after).exp().t()[..., None] for x in (before, part_lse))
    o[at] = (o[at].float() * old + part.float() * new).to(o.dtype)
    lse[:, at] = after


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
        add = tl.load(
            part + row[:, None] * p_token + head * p_head + lane[None, :], mask=here, other=0.0
        ).to(tl.float32)
        mixed = old * tl.exp(before - after)[:, None] + add * tl.exp(new - after)[:, None]
        tl.store(to, mixed.to(o.dtype.element_ty), mask=here)

    return merge


def merge_cuda(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, at: slice | Tensor) -> None:
    """As `merge_reference` in plain torch, in one kernel."""
    count, heads, width = part.shape
    part_lse = part_lse.contiguous()
    places = at if isinstance(at, Tensor) else torch.empty(0, dtype=torch.int64, device=o.device)
    _kernel()[(-(-count // ROWS), heads)](
        o, o.stride(0), o.stride(1), lse, lse.stride(0), part, part.stride(0), part.stride(1), part_lse, places,
        at.start if isinstance(at, slice) else 0, count,
        LISTED=isinstance(at, Tensor), WIDTH=width, PADDED=1 << (width - 1).bit_length(), BLOCK=ROWS,
    )  # fmt: skip


def _plain(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor]:
    o, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for at, to in _sequences(starts_q, starts_k):
        scores, _, one_v = _scores(q[at], k[to], v[to], left, right)
        lse[:, at] = scores.logsumexp(-1)
        o[at] = torch.einsum("hts,shd->thd", (scores - lse[:, at, None]).exp(), one_v).to(o.dtype)
    return o, lse


def _plain_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scale, groups = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    for at, to in _sequences(starts_q, starts_k):
        scores, one_k, one_v = _scores(q[at], k[to], v[to], left, right)
        weights = (scores - lse[:, at, None]).exp()
        delta = (do[at].float() * o[at].float()).sum(-1).t()[..., None]
        d_scores = weights * (torch.einsum("thd,shd->hts", do[at].float(), one_v) - delta) * scale
        dq[at] = torch.einsum("hts,shd->thd", d_scores, one_k).to(dq.dtype)
        for total, by_head in (
            (dk, torch.einsum("hts,thd->shd", d_scores, q[at].float())),
            (dv, torch.einsum("hts,thd->shd", weights, do[at].float())),
        ):
            total[to] = by_head.unflatten(1, (-1, groups)).sum(2).to(total.dtype)
    return dq, dk, dv


def _sequences(starts_q: Tensor, starts_k: Tensor) -> Iterable[tuple[slice, slice]]:
    for (a, b), (c, d) in zip(
        itertools.pairwise(starts_q.tolist()), itertools.pairwise(starts_k.tolist()), strict=True
    ):
        if b > a:
            yield slice(a, b), slice(c, d)


def _scores(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masked fp32 scores [H,t,s] of one sequence, and its keys and values [s,H,hd]."""
    k32, v32 = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k32) * q.shape[-1] ** -0.5
    distance = (
        torch.arange(k.shape[0])[None, :]
        - torch.arange(q.shape[0])[:, None]
        - (k.shape[0] - q.shape[0])
    )
    hidden = ((distance > right) if right >= 0 else False) | (
        (distance < -left) if left >= 0 else False
    )
    return scores if isinstance(hidden, bool) else scores.masked_fill(hidden, -torch.inf), k32, v32

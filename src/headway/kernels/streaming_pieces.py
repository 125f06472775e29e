"""Streaming attention as FlashAttention calls over packed tokens, merged by their log-sum-exp.

For each document of n tokens, window w, sinks s:

    piece     queries              keys               visible
    window    all                  all                the last w up to the query
    corner    w .. w+s-1           0 .. s-1           key <= query - w: the sinks that have left the
                                                      window, a triangle
    sinks     w+s .. n-1           0 .. s-1           all

The pieces of one query are disjoint, so with lse = log(sum of exp(lse_p)) the output is sum of o_p
* exp(lse_p - lse). Backward runs FlashAttention's backward on each piece with the merged output and
lse: the weight it computes again, exp(score - lse), is then that of the whole. Long ranges of
queries are split into segments, each with its own copy of the sinks (a few rows), so that the
gradient of the sinks is not computed by one block alone.

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
    """Find the queries that see sinks outside their window. Works on the host; the device does not
    wait where the mask knows its bounds."""
    length = mask.document.shape[1]
    corner: list[tuple[int, int, int]] = []
    beyond: list[tuple[int, int, int]] = []
    for row, bounds in enumerate(mask.on_host()):
        for start, stop in itertools.pairwise(bounds):
            begin = row * length + start
            size = stop - start
            if not sinks or size <= window:
                continue  # the window shows all of the document
            # The first query that has lost a sink is at `window`; from window + sinks on all are
            # lost.
            corner.append((begin, window, min(size - window, sinks)))
            for first in range(window + sinks, size, SEGMENT):
                beyond.append((begin, first, min(SEGMENT, size - first)))
    device = mask.bounds.device
    pieces = [_piece(corner, None, device), _piece(beyond, sinks, device)]
    return StreamPlan(mask.bounds, window, tuple(piece for piece in pieces if piece is not None))


def _piece(
    ranges: list[tuple[int, int, int]], sinks: int | None, device: torch.device
) -> AttentionPiece | None:
    """Ranges (document start, first query, queries) as one piece; without `sinks`, as many keys as
    queries and causal."""
    if not ranges:
        return None
    spans = [(begin + first, begin + first + many) for begin, first, many in ranges]
    counts = [many for _, _, many in ranges]
    if sinks is None:
        widths = counts
    else:
        widths = [sinks] * len(ranges)
    # Spans that follow each other are a slice, which costs no copy.
    is_contiguous = all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    if is_contiguous:
        queries = slice(spans[0][0], spans[-1][1])
    else:
        queries = _moved(_places(spans), device)
    keys = _places(
        (begin, begin + width) for (begin, _, _), width in zip(ranges, widths, strict=True)
    )
    # Segments repeat the same sinks; backward adds the copies up.
    unique, copy_of = torch.unique(keys, return_inverse=True)
    return AttentionPiece(
        queries,
        _moved(keys, device),
        _moved(unique, device),
        _moved(copy_of, device),
        _starts(counts, device),
        _starts(widths, device),
        longest_q=max(counts),
        longest_k=max(widths),
        right=0 if sinks is None else -1,
    )


def _places(spans: Iterable[tuple[int, int]]) -> Tensor:
    """int64 on the host: all positions of some spans (start, stop), in order."""
    return torch.cat([torch.arange(start, stop) for start, stop in spans])


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    """int32 [n + 1] on the device: where sequences of these lengths begin, and the end."""
    return _moved(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), device)


def _moved(host: Tensor, device: torch.device) -> Tensor:
    """On the device; the host does not wait for a copy from page-locked memory."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host


def stream_pieces(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: StreamPlan) -> Tensor:
    """o [B,T,H,hd] of q [B,T,H,hd], k and v [B,T,KV,hd]."""
    flat = (x.flatten(0, 1) for x in (q, k, v))
    o: Any = _Stream.apply(*flat, mask, plan)
    return o.view(q.shape)


class _Stream(torch.autograd.Function):
    """o [N,H,hd] of flattened q, k, v: the window first, then every piece merged into it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plan: StreamPlan
    ) -> Tensor:
        starts = mask.cu_seqlens
        longest = mask.max_length
        o, lse = flash(q, k, v, starts, starts, longest, longest, plan.window - 1, 0)
        for piece in plan.pieces:
            part, part_lse = flash(
                _take(q, piece.queries), *_sinks(k, v, piece), *_shape(piece), -1, piece.right
            )
            merge(o, lse, part, part_lse, piece.queries)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mask = mask
        ctx.plan = plan
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        plan: StreamPlan = ctx.plan
        starts = ctx.mask.cu_seqlens
        longest = ctx.mask.max_length
        do = grads[0].contiguous()
        dq, dk, dv = flash_backward(
            do, q, k, v, o, lse, starts, starts, longest, longest, plan.window - 1, 0
        )
        for piece in plan.pieces:
            queries = piece.queries
            if isinstance(queries, slice):
                part_lse = lse[:, queries].contiguous()
            else:
                part_lse = lse.index_select(1, queries)
            arguments = (
                _take(do, queries),
                _take(q, queries),
                *_sinks(k, v, piece),
                _take(o, queries),
                part_lse,
            )
            part_q, part_k, part_v = flash_backward(*arguments, *_shape(piece), -1, piece.right)
            if isinstance(queries, slice):
                dq[queries] += part_q
            else:
                dq.index_add_(0, queries, part_q)
            # The copies of a sink add their gradients up in fp32, before they are rounded once.
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


def _take(x: Tensor, queries: slice | Tensor) -> Tensor:
    if isinstance(queries, slice):
        return x[queries]
    return x.index_select(0, queries)


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
    """(o [T,H,hd], lse [H,T]) of packed sequences; key b is visible to query a iff -left <= b - a -
    (keys - queries) <= right, -1 = any."""
    if not q.is_cuda:
        return _plain(q, k, v, starts_q, starts_k, left, right)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        0.0,
        left == -1 and right == 0,
        False,
        window_size_left=left,
        window_size_right=right,
    )
    return o, lse


def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of packed sequences, where o and lse may be those of a larger
    whole."""
    if not q.is_cuda:
        return _plain_backward(do, q, k, v, o, lse, starts_q, starts_k, left, right)
    # The state of dropout's random numbers, which nothing reads at dropout 0.
    unused = torch.empty(0, device=q.device)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        do,
        q,
        k,
        v,
        o,
        lse,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        0.0,
        left == -1 and right == 0,
        state,
        unused,
        window_size_left=left,
        window_size_right=right,
    )


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, queries: slice | Tensor) -> None:
    """Bring a piece into the whole, in place: o [T,H,hd] and lse [H,T] at the queries of part
    [t,H,hd] and part_lse [H,t]."""
    if o.is_cuda:
        merge_cuda(o, lse, part, part_lse, queries)
    else:
        merge_reference(o, lse, part, part_lse, queries)


def merge_reference(
    o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, queries: slice | Tensor
) -> None:
    """Plain torch; what the fused kernel is compared to."""
    before = lse[:, queries]
    after = torch.logaddexp(before, part_lse)
    old, new = ((x - after).exp().t()[..., None] for x in (before, part_lse))
    o[queries] = (o[queries].float() * old + part.float() * new).to(o.dtype)
    lse[:, queries] = after


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
            position = tl.load(places + row, mask=inside, other=0)
        else:
            position = first + row
        # log(exp(before) + exp(new)), with the larger one taken out so that nothing overflows
        before = tl.load(lse + head * lse_head + position, mask=inside, other=0.0)
        new = tl.load(part_lse + head * count + row, mask=inside, other=0.0)
        highest = tl.maximum(before, new)
        after = highest + tl.log(tl.exp(before - highest) + tl.exp(new - highest))
        tl.store(lse + head * lse_head + position, after, mask=inside)
        # head widths need not be powers of two, blocks must be
        lane = tl.arange(0, PADDED)
        here = inside[:, None] & (lane < WIDTH)[None, :]
        to = o + position[:, None] * o_token + head * o_head + lane[None, :]
        old = tl.load(to, mask=here, other=0.0).to(tl.float32)
        add = tl.load(
            part + row[:, None] * p_token + head * p_head + lane[None, :], mask=here, other=0.0
        ).to(tl.float32)
        mixed = old * tl.exp(before - after)[:, None] + add * tl.exp(new - after)[:, None]
        tl.store(to, mixed.to(o.dtype.element_ty), mask=here)

    return merge


def merge_cuda(
    o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, queries: slice | Tensor
) -> None:
    """As `merge_reference` in plain torch, in one kernel."""
    count, heads, width = part.shape
    part_lse = part_lse.contiguous()
    if isinstance(queries, Tensor):
        places = queries
    else:
        places = torch.empty(0, dtype=torch.int64, device=o.device)
    _kernel()[(-(-count // ROWS), heads)](
        o,
        o.stride(0),
        o.stride(1),
        lse,
        lse.stride(0),
        part,
        part.stride(0),
        part.stride(1),
        part_lse,
        places,
        queries.start if isinstance(queries, slice) else 0,
        count,
        LISTED=isinstance(queries, Tensor),
        WIDTH=width,
        PADDED=1 << (width - 1).bit_length(),
        BLOCK=ROWS,
    )


def _plain(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor]:
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for queries, keys in _sequences(starts_q, starts_k):
        scores, _, v32 = _scores(q[queries], k[keys], v[keys], left, right)
        lse[:, queries] = scores.logsumexp(-1)
        weights = (scores - lse[:, queries, None]).exp()
        o[queries] = torch.einsum("hts,shd->thd", weights, v32).to(o.dtype)
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
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    scale = q.shape[-1] ** -0.5
    groups = q.shape[1] // k.shape[1]
    for queries, keys in _sequences(starts_q, starts_k):
        scores, k32, v32 = _scores(q[queries], k[keys], v[keys], left, right)
        weights = (scores - lse[:, queries, None]).exp()
        # What a softmax's backward subtracts: sum_s weight_s dweight_s = do . o, of the merged o.
        delta = (do[queries].float() * o[queries].float()).sum(-1).t()[..., None]
        d_scores = (
            weights * (torch.einsum("thd,shd->hts", do[queries].float(), v32) - delta) * scale
        )
        dq[queries] = torch.einsum("hts,shd->thd", d_scores, k32).to(dq.dtype)
        for total, by_head in (
            (dk, torch.einsum("hts,thd->shd", d_scores, q[queries].float())),
            (dv, torch.einsum("hts,thd->shd", weights, do[queries].float())),
        ):
            # Query heads of a group share a key head, which gets the sum of their gradients.
            total[keys] = by_head.unflatten(1, (-1, groups)).sum(2).to(total.dtype)
    return dq, dk, dv


def _sequences(starts_q: Tensor, starts_k: Tensor) -> Iterable[tuple[slice, slice]]:
    for (a, b), (c, d) in zip(
        itertools.pairwise(starts_q.tolist()), itertools.pairwise(starts_k.tolist()), strict=True
    ):
        if b > a:  # padded bounds are sequences without tokens
            yield slice(a, b), slice(c, d)


def _scores(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Masked fp32 scores [H,t,s] of one sequence, and its keys and values [s,H,hd]."""
    k32, v32 = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.float(), k32) * q.shape[-1] ** -0.5
    # As FlashAttention counts: the last query stands at the last key.
    distance = (
        torch.arange(k.shape[0])[None, :]
        - torch.arange(q.shape[0])[:, None]
        - (k.shape[0] - q.shape[0])
    )
    if right >= 0:
        scores = scores.masked_fill(distance > right, -torch.inf)
    if left >= 0:
        scores = scores.masked_fill(distance < -left, -torch.inf)
    return scores, k32, v32

"""Causal attention whose result for a token depends on that token and on those before it alone, in
every bit: the same in a packed row, in a piece of a prompt and in a decoding step.

    queries   by KV head, QUERIES rows of a product at a time: several tokens of a document, or the
              heads of one token and zeros
    keys      KEYS positions at a time, counted from the beginning of the document, one block after
              the other:

        s_j = q k_j / sqrt(hd)          -inf where the key comes later
        m'  = max(m, max s_j)
        l   = l exp(m - m') + sum exp(s_j - m')
        o   = o exp(m - m') + exp(s_j - m') v_j        at the end o / l

The running form is that of Milakov and Gimelshein 2018 (arXiv:1805.02867). A block of later keys
multiplies by 1 and adds 0, so it makes no difference whether it is there. The arithmetic is fp32.

Shapes: N groups of query rows, L tokens of a document, H query heads, KV key and value heads,
G = H / KV, hd head width, R rows of a product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.attention import AttentionMask

KEYS = 64
"""Positions whose scores exist at one time; pages of a cache have a multiple of them."""
QUERIES = 16
"""Rows of a product are a multiple of this."""
CHANNELS = 16
"""Products of other widths sum the last rows of a block in another order (measured with MKL)."""
KeyBlock = Callable[[int, int], tuple[Tensor, Tensor]]
"""(number of a block, first group) -> keys and values [n, KV, KEYS, hd] of the groups from that
one on."""


def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, window: int | None = None
) -> Tensor:
    """o [B,T,H,hd] of q [B,T,H,hd], k and v [B,T,KV,hd]: the attention core of a layer.

    No window may be shorter than a row: such layers are refused."""
    pieces: list[Tensor] = []
    for row, bounds in enumerate(mask.on_host()):
        for start, stop in itertools.pairwise(bounds):
            document = (x[row, start:stop] for x in (q, k, v))
            pieces.append(_ExactAttention.apply(*document))  # pyright: ignore[reportArgumentType]
    return torch.cat(pieces).view(q.shape)


def attend_one(q: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """o [B,H,hd] of one query q [B,H,hd] of each sequence, at positions [B]; keys and values
    [B,S,KV,hd] of a sequence begin with its first, and S is a multiple of KEYS."""
    heads = keys.shape[2]
    rows = product_rows(q.shape[1] // heads)
    grouped = q.unflatten(1, (heads, -1))
    padded = F.pad(grouped, (0, 0, 0, rows - grouped.shape[2]))

    def block(number: int, first: int) -> tuple[Tensor, Tensor]:
        part = slice(number * KEYS, (number + 1) * KEYS)
        return keys[first:, part].transpose(1, 2), values[first:, part].transpose(1, 2)

    places = position.clamp(min=0)[:, None].expand(-1, rows)
    o, _ = _attended(padded, block, places, keys.shape[1] // KEYS)
    return o[:, :, : grouped.shape[2]].flatten(1, 2).to(q.dtype)


def attend_piece(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """o [n,H,hd] of the queries q [n,H,hd] at positions from `start` on; k and v [start + n,KV,hd]
    of the sequence."""
    return _document(q, k, v, start)[0].to(q.dtype)


def product_rows(heads: int) -> int:
    """Rows of a product for so many query heads of a KV head."""
    return -(-heads // QUERIES) * QUERIES


def _document(q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """fp32 o [n,H,hd] and lse [n,H] of queries at positions from `start` on."""
    count, num_heads, width = q.shape
    kv_heads = k.shape[1]
    heads = num_heads // kv_heads
    rows = product_rows(heads)

    # Several tokens share a product: [n,H,hd] -> [N, tokens, KV, G, hd] -> [N, KV, rows, hd].
    tokens = rows // heads
    filled = F.pad(q, (0, 0, 0, 0, 0, -count % tokens))
    groups = filled.unflatten(1, (kv_heads, heads)).unflatten(0, (-1, tokens))
    folded = groups.permute(0, 2, 1, 3, 4).flatten(2, 3)
    folded = F.pad(folded, (0, 0, 0, rows - tokens * heads))
    num_groups = len(folded)

    # The last rows are padding, and may stand anywhere.
    offsets = torch.arange(rows, device=q.device).div(heads, rounding_mode="floor")
    firsts = start + torch.arange(num_groups, device=q.device) * tokens
    position = firsts[:, None] + offsets.clamp(max=tokens - 1)

    num_blocks = -(-(start + count) // KEYS)
    keys, values = (F.pad(x, (0, 0, 0, 0, 0, num_blocks * KEYS - len(x))) for x in (k, v))

    def block(number: int, first: int) -> tuple[Tensor, Tensor]:
        part = slice(number * KEYS, (number + 1) * KEYS)
        shape = (num_groups - first, kv_heads, KEYS, width)
        return (
            keys[part].transpose(0, 1).expand(shape),
            values[part].transpose(0, 1).expand(shape),
        )

    # All groups see the first block; the first groups do not reach the later ones.
    first_groups = [max(0, (number * KEYS - start) // tokens) for number in range(num_blocks)]
    o, lse = _attended(folded, block, position, num_blocks, first_groups)

    def unfolded(x: Tensor) -> Tensor:
        """[N, KV, rows, ...] -> [n, H, ...]."""
        kept = x[:, :, : tokens * heads].unflatten(2, (tokens, heads))
        return kept.transpose(1, 2).flatten(0, 1).flatten(1, 2)[:count]

    return unfolded(o), unfolded(lse)


def _attended(
    q: Tensor,
    block: KeyBlock,
    position: Tensor,
    num_blocks: int,
    first_groups: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 o [N,KV,R,hd] and lse [N,KV,R] of q [N,KV,R,hd] at positions [N,R]. `first_groups`: of
    each block of keys, the first group that sees some of them."""
    width = q.shape[-1]
    queries = _widened(q.float() * width**-0.5)
    o = torch.zeros_like(queries)
    total = queries.new_zeros(queries.shape[:-1])
    largest = queries.new_full(queries.shape[:-1], -torch.inf)
    for number in range(num_blocks):
        first = 0
        if first_groups is not None:
            first = first_groups[number]
        keys, values = (_widened(x.float()).contiguous() for x in block(number, first))
        some = queries[first:]
        scores = _products(some, keys.transpose(2, 3))
        place = number * KEYS + torch.arange(KEYS, device=q.device)
        is_later = place > position[first:, None, :, None]
        scores = scores.masked_fill(is_later, -torch.inf)

        before = largest[first:]
        now = torch.maximum(before, scores.amax(-1))
        decay = (before - now).exp()
        shares = (scores - now[..., None]).exp()
        total[first:] = total[first:] * decay + shares.sum(-1)
        o[first:] = o[first:] * decay[..., None] + _products(shares, values)
        largest[first:] = now
    return o[..., :width] / total[..., None], largest + total.log()


def _widened(x: Tensor) -> Tensor:
    """Channels up to a multiple of CHANNELS, of zeros."""
    return F.pad(x, (0, -x.shape[-1] % CHANNELS))


def _products(a: Tensor, b: Tensor) -> Tensor:
    """[N,KV,R,S] of [N,KV,R,K] and [N,KV,K,S]: one product of fixed shape for each group and
    head."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


class _ExactAttention(torch.autograd.Function):
    """Attention of one document: q [L,H,hd], k and v [L,KV,hd]. The gradients are those of plain
    causal attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = _document(q, k, v, 0)
        ctx.save_for_backward(q, k, v, o, lse)
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        gradient = grads[0].float()
        heads = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        length = q.shape[0]
        is_later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        d_q = torch.empty_like(q, dtype=torch.float32)
        d_k = torch.empty_like(k, dtype=torch.float32)
        d_v = torch.empty_like(v, dtype=torch.float32)
        for head in range(k.shape[1]):
            # [G,L,hd] of the query heads that read this head.
            part = slice(head * heads, (head + 1) * heads)
            queries, output, d_o = (x[:, part].float().transpose(0, 1) for x in (q, o, gradient))
            keys = k[:, head].float()
            values = v[:, head].float()

            scores = (queries @ keys.t()).mul_(scale).masked_fill_(is_later, -torch.inf)
            shares = scores.sub_(lse[:, part].t()[..., None]).exp_()
            # ds = p (dp - sum of do o), of softmax.
            d_scores = (d_o @ values.t()).sub_((d_o * output).sum(-1, keepdim=True)).mul_(shares)
            d_q[:, part] = (d_scores @ keys).mul_(scale).transpose(0, 1)
            d_k[:, head] = (d_scores.transpose(1, 2) @ queries).sum(0).mul_(scale)
            d_v[:, head] = (shares.transpose(1, 2) @ d_o).sum(0)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)

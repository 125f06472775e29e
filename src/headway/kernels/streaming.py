"""Streaming attention: each token sees the first `sinks` tokens of its document and the last
`window` tokens up to itself.

Shapes: B rows, T tokens, H query heads, KV key and value heads, hd head width.  q [B,T,H,hd], k and
v [B,T,KV,hd], o [B,T,H,hd].

    key j is visible to query i of the same document iff j <= i and (i - j < window or j < sinks),
    where i and j are positions inside the document; for i < window + sinks that is all of the past

    backend     where           what it does
    reference   anywhere        dense mask, fp32 softmax in plain torch: what the others are
                                compared with
    blocks      anywhere        SDPA over blocks of queries, each against the sinks and the window
                                before it
    pieces      CUDA, 16 bit    FlashAttention over the window and over the sinks, merged
                                (streaming_pieces.py)

Work and memory grow with T * (window + sinks), never with T * T; keys and values are never copied
to all query heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import ConfigError
from headway.kernels.attention import AttentionMask, band, dense, reference, visible, why_not
from headway.kernels.streaming_pieces import StreamPlan, plan_pieces, stream_pieces

BACKENDS = ("reference", "blocks", "pieces")
MIN_BLOCK = 128
"""Queries of one block at least: narrower ones would spend their time on overlapping keys."""


@dataclass(frozen=True)
class StreamingWindow:
    """What a streaming head sees."""

    window: int
    """Tokens up to and including the query itself."""
    sinks: int
    """First tokens of the document; 0 = local attention."""
    plans: dict[int, StreamPlan] = field(default_factory=dict, compare=False, repr=False)
    """Plans by mask, so that all layers share one."""

    def plan(self, mask: AttentionMask) -> StreamPlan:
        """The pieces of a mask; made once per mask."""
        plan = self.plans.get(id(mask.bounds))
        # The plan keeps its tensor alive; another one may have its number only after it was
        # dropped.
        if plan is None or plan.bounds is not mask.bounds:
            # One plan is kept, so that the masks of earlier passes are not kept alive.
            self.plans.clear()
            plan = plan_pieces(mask, self.window, self.sinks)
            self.plans[id(mask.bounds)] = plan
        return plan


def stream(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    reach: StreamingWindow,
    *,
    backend: str = "auto",
) -> Tensor:
    """Attention of each token to the sinks of its document and to the window that ends with it."""
    if backend == "auto":
        backend = choose(q, mask)
    elif backend not in BACKENDS:
        raise ConfigError(
            f"streaming backend is {backend!r}; it must be one of {', '.join(BACKENDS)}."
        )
    if backend == "reference":
        return reference(q, k, v, visible_streaming(mask, reach))
    if backend == "pieces":
        return stream_pieces(q, k, v, mask, reach.plan(mask))
    return _blocks(q, k, v, mask, reach)


def choose(q: Tensor, mask: AttentionMask) -> str:
    """The fastest exact backend for this case."""
    return "blocks" if why_not("varlen", q.device.type, q.dtype, q.shape[-1]) else "pieces"


def visible_streaming(mask: AttentionMask, reach: StreamingWindow) -> Tensor:
    """The dense mask, bool [B, T of queries, T of keys]."""
    length = mask.document.shape[1]
    # Positions count from the beginning of the document, not of the row.
    start = mask.bounds.long().gather(1, mask.document.long())
    is_sink = torch.arange(length, device=mask.document.device) - start < reach.sinks
    return visible(mask, None) & (
        band(length, reach.window, mask.document.device) | is_sink[:, None, :]
    )


def _blocks(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, reach: StreamingWindow) -> Tensor:
    pieces: list[Tensor] = []
    for row, bounds in enumerate(mask.on_host()):
        for start, stop in itertools.pairwise(bounds):
            document = [x[row : row + 1, start:stop] for x in (q, k, v)]
            pieces += _document(document[0], document[1], document[2], reach)
    return torch.cat(pieces, dim=1).view(q.shape)


def _document(q: Tensor, k: Tensor, v: Tensor, reach: StreamingWindow) -> list[Tensor]:
    """One document [1,n,...]: its beginning sees all of the past; each block behind it sees the
    sinks and the window before it."""
    length = q.shape[1]
    window = reach.window
    sinks = reach.sinks
    head = min(length, window + sinks)
    outputs = [_causal(q[:, :head], k[:, :head], v[:, :head])]

    # As wide as the window: a block then reads about twice the keys that one query sees.
    block = max(window, MIN_BLOCK)
    for begin in range(head, length, block):
        end = min(begin + block, length)
        # the first key that the block's first query sees; past the sinks, since begin >= window +
        # sinks
        first = begin - window + 1
        near_k = k[:, first:end]
        near_v = v[:, first:end]
        if sinks:
            near_k = torch.cat((k[:, :sinks], near_k), dim=1)
            near_v = torch.cat((v[:, :sinks], near_v), dim=1)
        i = torch.arange(begin, end, device=q.device)[:, None]
        j = torch.arange(first, end, device=q.device)[None, :]
        # sinks stand in front and are visible to every query
        seen = F.pad((j <= i) & (i - j < window), (sinks, 0), value=True)
        outputs.append(dense(q[:, begin:end], near_k, near_v, seen[None]))
    return outputs


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)

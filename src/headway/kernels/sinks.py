"""Attention with a trained sink per query head: a logit beside the scores of keys whose value is 0,
so that a head may attend to nothing.

    weights     exp(score_j) / (exp(sink) + sum exp(score_i))

Attention to the keys alone, o and its log-sum-exp lse, becomes that by a factor:

    o' = o * sigmoid(lse - sink)        lse' = log(exp(lse) + exp(sink))

and so every kernel that returns its log-sum-exp has sinks. Backward is that of the kernel too,
given o' and lse': the probabilities of keys are exp(score - lse'), and what a softmax subtracts is
sum(do * o'), to which the sink adds nothing. The gradient of the sink is -exp(sink - lse') * sum(do
* o'), summed over tokens.

Shapes: B rows, T tokens, N tokens of all rows, H query heads, KV key and value heads, hd head
width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.attention import AttentionMask


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of fp32 scores over the last dim; `sinks` [...,1] take part in the denominator."""
    if sinks is None:
        return scores.softmax(-1)
    # One more key whose value is 0: its column is cut off after the softmax.
    beside = sinks.float().expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]


def add_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(o', lse') of o [...,T,H,hd], which is overwritten, and lse fp32 [...,H,T], with sinks
    [H]."""
    beside = sinks.float()[:, None]
    share = torch.sigmoid(lse - beside)
    o.mul_(share.transpose(-1, -2)[..., None])
    return o, torch.logaddexp(lse, beside)


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: AttentionMask, window: int | None
) -> Tensor:
    """o [B,T,H,hd] of all documents of all rows by FlashAttention, in plain torch on the CPU."""
    left = -1
    if window is not None:
        left = window - 1
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    o = _PackedAttention.apply(
        flat_q, flat_k, flat_v, sinks, mask.cu_seqlens, mask.max_length, left
    )
    return o.view(q.shape)  # pyright: ignore[reportAttributeAccessIssue]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        starts: Tensor,
        longest: int,
        left: int,
    ) -> Tensor:
        from headway.kernels.streaming_pieces import flash

        o, lse = add_sinks(*flash(q, k, v, starts, starts, longest, longest, left, 0), sinks)
        ctx.save_for_backward(q, k, v, sinks, starts, o, lse)
        ctx.longest = longest
        ctx.left = left
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        from headway.kernels.streaming_pieces import flash_backward

        q, k, v, sinks, starts, o, lse = ctx.saved_tensors
        d_o = d_o.contiguous()
        d_q, d_k, d_v = flash_backward(
            d_o, q, k, v, o, lse, starts, starts, ctx.longest, ctx.longest, ctx.left, 0
        )
        # o' and lse' are saved, not o and lse: what the formulas at the top are in.
        taken = (d_o.float() * o.float()).sum(-1)  # [N,H]
        d_sinks = -(torch.exp(sinks.float()[:, None] - lse).t() * taken).sum(0).to(sinks.dtype)
        return d_q, d_k, d_v, d_sinks, None, None, None

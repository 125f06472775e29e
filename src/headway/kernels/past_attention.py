"""Causal attention of new tokens behind a stored past, on CUDA: q [B,T,H,hd] of the last T of S
positions, k and v [B,S,KV,hd] of all.

                past             new
    new tokens  all visible      causal

    fa4     one call, whose causal edge ends at the last query and the last key
    cudnn   one call for each of the two rectangles, merged by their log-sum-exp: twice as fast as
            FlashAttention-2 on Hopper
    flash   FlashAttention-2, one call per row: a row's keys are one stretch of the cache, and
            packing all rows' would copy the past
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import flash4
from headway.kernels.attention import varlen_kernel, why_not
from headway.kernels.sinks import add_sinks
from headway.kernels.streaming_pieces import flash as packed_flash
from headway.kernels.streaming_pieces import merge

MIN_PAST = 512
"""Behind a shorter past two calls and a merge cost more than one slow call."""


def attend_past(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """o [B,T,H,hd]; needs 16-bit tensors on CUDA (`why_not` of varlen). `sinks` [H]: a logit of
    each head beside its keys."""
    # FlashAttention-4 is the fastest, but returns nothing that sinks could be added to here.
    if sinks is None and not why_not("fa4", q.device.type, q.dtype, q.shape[-1]):
        return flash4.causal(q, k, v, None)
    if k.shape[1] - q.shape[1] >= MIN_PAST and has_cudnn(q.dtype, q.shape[-1]):
        o, lse = two_parts(q, k, v)
        if sinks is None:
            return o
        return add_sinks(o, lse, sinks)[0]
    return flash(q, k, v, sinks)


def two_parts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """cuDNN's attention to the past and to the new tokens, merged: (o [B,T,H,hd], log-sum-exp fp32
    [B,H,T])."""
    past = k.shape[1] - q.shape[1]
    o, lse = cudnn_part(q, k[:, past:], v[:, past:], causal=True)
    past_o, past_lse = cudnn_part(q, k[:, :past], v[:, :past], causal=False)
    for row in range(q.shape[0]):
        merge(o[row], lse[row], past_o[row], past_lse[row], slice(0, q.shape[1]))
    return o, lse


def cudnn_part(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(o [B,T,H,hd], log-sum-exp fp32 [B,H,T])."""
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    o, lse, *_ = call(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, causal, False
    )
    return o.transpose(1, 2), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


@cache
def has_cudnn(dtype: torch.dtype, head_size: int) -> bool:
    """Whether cuDNN gives right results here, tried on a small case with grouped heads: not every
    version and width can."""
    if not (torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()):
        return False
    q, k, v = (
        torch.randn(1, 128, heads, head_size, device="cuda").to(dtype) for heads in (4, 2, 2)
    )
    try:
        o, lse = cudnn_part(q, k, v, causal=False)
    except RuntimeError:
        return False
    # Both results are checked: merging needs a right log-sum-exp as much as a right output.
    k32, v32 = (x.float().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q.float(), k32) * head_size**-0.5
    right = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v32)
    return bool((o.float() - right).abs().max() < 2e-2) and bool(
        (lse - scores.logsumexp(-1)).abs().max() < 2e-2
    )


def flash(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """o [B,T,H,hd] by FlashAttention-2, row by row; shapes as in `attend_past`."""
    kernel = varlen_kernel(q.shape[2] != k.shape[2])
    tokens = q.shape[1]
    total = k.shape[1]
    # Every row has the same lengths, so one pair of bounds serves all of them.
    starts = F.pad(torch.tensor([[tokens], [total]], dtype=torch.int32).pin_memory(), (1, 0)).to(
        q.device, non_blocking=True
    )
    o = torch.empty_like(q)
    for row in range(q.shape[0]):
        # Where there are more keys than queries the causal edge ends at the last of both.
        if sinks is None:
            o[row] = kernel(
                q[row], k[row], v[row], starts[0], starts[1], tokens, total, window_size=(-1, 0)
            )
        else:
            o[row] = add_sinks(
                *packed_flash(q[row], k[row], v[row], starts[0], starts[1], tokens, total, -1, 0),
                sinks,
            )[0]
    return o

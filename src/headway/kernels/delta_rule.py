"""The gated delta rule (Yang 2024, arXiv:2412.06464): linear attention whose state forgets by a gate
and replaces what it holds under a key, instead of adding to it.

A head has a state S [K,V], which begins with 0. For each token, with unit keys and queries,

    S_t = a_t S_{t-1} + k_t u_t^T        u_t = b_t (v_t - a_t S_{t-1}^T k_t)     a_t = exp(g_t) in (0, 1]
    o_t = S_t^T q_t / sqrt(K)                                                   b_t in (0, 1)

Token by token this is slow. In chunks of C tokens it is a few matrix products. Let c_i be the sum of
g over the first i tokens of a chunk, and S the state before it. Then for all of its tokens together

    (I + A) U = b V - b e^c (K S)        A[i,j] = b_i e^(c_i - c_j) (k_i . k_j) for j < i, else 0
    O = e^c (Q S) + P U                  P[i,j] = e^(c_i - c_j) (q_i . k_j) for j <= i, else 0
    S' = e^(c_C) S + (e^(c_C - c) K)^T U

so only S passes from chunk to chunk (the WY form of Yang 2024, arXiv:2406.06484). A place without a
token has k = 0, b = 0 and g = 0, and changes nothing. All arithmetic is fp32.

Chunks begin with their document (segments.py), and documents share no state: a packed row gives the
bits that its documents give alone.

Shapes: N tokens of all segments, S segments, G key heads, H value heads (H / G of them share a key
head), K width of a key, V width of a value, C places of a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.kernels.segments import chunk_decays

if TYPE_CHECKING:
    from headway.kernels.segments import Segments

CHUNK = 64
"""Tokens of a chunk: as many as make matrix products worth while; work inside of a chunk grows with
them."""
UNIT_EPS = 1e-6
"""Added to the squared length of keys and queries before they are divided by it."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    segments: Segments,
    past: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(o fp32 [N,H,V], states fp32 [S,H,K,V] after each segment) of q and k [N,G,K], v [N,H,V], the
    logarithms g of the decays and the rates b, [N,H] each.

    `past` [S,H,K,V]: the state before each segment; None: 0.
    """
    plan = segments.chunks(chunk)
    heads = v.shape[1]
    q, k = unit_heads(q, k)

    # [chunks, heads, C, width]
    q = plan.of_tokens(q)
    k = plan.of_tokens(k)
    v = plan.of_tokens(v.float())
    rate = plan.of_tokens(b.float())

    # e^(c_i - c_j) and e^(c_i)
    between, from_start = chunk_decays(plan.of_tokens(g.float()))
    system = _for_values(k @ k.transpose(-1, -2), heads) * between * rate[..., None]
    scores = _for_values(q @ k.transpose(-1, -2), heads) * between

    q = _for_values(q, heads) * from_start[..., None]
    k = _for_values(k, heads)
    decayed_keys = k * (rate * from_start)[..., None]
    # The solver reads what is below the diagonal and takes 1 on it.
    right = torch.cat((v * rate[..., None], decayed_keys), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    # What decays from each token to the end of its chunk is the last row.
    k = k * between[..., -1, :, None]
    whole_decay = from_start[..., -1, None, None]

    state = past
    if state is None:
        state = q.new_zeros(len(segments.lengths), heads, k.shape[-1], v.shape[-1])
    # From the order of segments to that of a plan; back again at the end.
    state = plan.in_order(state)

    results: list[Tensor] = []
    ended: list[Tensor] = []
    for step in plan.steps:
        count = step.stop - step.start
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        update = new_values[step] - reads[step] @ state
        results.append(q[step] @ state + scores[step] @ update)
        state = state * whole_decay[step] + k[step].transpose(-1, -2) @ update

    o = plan.to_tokens(torch.cat(results))
    states = torch.cat((state, *reversed(ended)))[plan.row]
    return o, states


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: (o fp32 [B,H,V], the next state) of q and k [B,G,K], v [B,H,V], g and b
    [B,H] and the state fp32 [B,H,K,V]."""
    heads = v.shape[1]
    q, k = unit_heads(q, k)
    q = q.repeat_interleave(heads // q.shape[1], dim=1)
    k = k.repeat_interleave(heads // k.shape[1], dim=1)

    state = state * g.float().exp()[..., None, None]
    held = (state * k[..., None]).sum(-2)
    update = (v.float() - held) * b.float()[..., None]
    state = state + k[..., None] * update[..., None, :]
    return (state * q[..., None]).sum(-2), state


def unit_heads(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of length 1, the queries divided by the root of their width; fp32."""
    q32 = q.float()
    k32 = k.float()
    q32 = q32 * torch.rsqrt(q32.square().sum(-1, keepdim=True) + UNIT_EPS)
    k32 = k32 * torch.rsqrt(k32.square().sum(-1, keepdim=True) + UNIT_EPS)
    return q32 * q.shape[-1] ** -0.5, k32


def _for_values(x: Tensor, heads: int) -> Tensor:
    """What key heads have, [chunks,G,...], for each value head, [chunks,H,...]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)

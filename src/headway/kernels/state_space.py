"""The recurrence of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a state that decays by a number of
each token and head, and adds the token.

A head has a state S [K,V], which begins with 0. For each token

    S_t = e^(g_t) S_{t-1} + k_t v_t^T        g_t <= 0
    o_t = S_t^T q_t

In the words of the paper: k = B, q = C, v = dt x and g = dt A. Token by token this is slow. In chunks of
C tokens it is a few matrix products. Let c_i be the sum of g over the first i tokens of a chunk, and S
the state before it. Then for all of its tokens together

    O = e^c (Q S) + P V                      P[i,j] = e^(c_i - c_j) (q_i . k_j) for j <= i, else 0
    S' = e^(c_C) S + K^T (e^(c_C - c) V)

so only S passes from chunk to chunk. A place without a token has k = 0, v = 0 and g = 0, and changes
nothing. All arithmetic is fp32.

Chunks begin with their document (segments.py), and documents share no state: a packed row gives the
bits that its documents give alone.

Shapes: N tokens of all segments, S segments, G groups that share queries and keys, H heads (H / G of
them in a group), K width of a key, V width of a value, C places of a chunk.
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


def state_space(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    segments: Segments,
    past: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(o fp32 [N,H,V], states fp32 [S,H,K,V] after each segment) of q and k [N,G,K], v [N,H,V] and the
    logarithms g [N,H] of the decays.

    `past` [S,H,K,V]: the state before each segment; None: 0.
    """
    plan = segments.chunks(chunk)
    heads = v.shape[1]
    groups = q.shape[1]

    # [chunks, groups or heads, C, width]. Contiguous: products of a single chunk would otherwise read
    # a view, those of several a copy, and the two may round differently.
    q = plan.of_tokens(q.float()).contiguous()
    k = plan.of_tokens(k.float()).contiguous()
    v = plan.of_tokens(v.float()).contiguous()
    between, from_start = chunk_decays(plan.of_tokens(g.float()))

    scores = (q @ k.transpose(-1, -2)).repeat_interleave(heads // groups, dim=1) * between
    inside = scores @ v

    # The last row of `between` is what decays from each token to the end of its chunk. Decays go to
    # the values: those have heads anyway, while keys would have to be copied for each head.
    to_end = v * between[..., -1, :, None]
    added = k.transpose(-1, -2) @ _joined(to_end, groups)
    decay = from_start[..., -1].unflatten(1, (groups, 1, -1))[..., None]

    state = past
    if state is None:
        state = v.new_zeros(len(segments.lengths), heads, k.shape[-1], v.shape[-1])
    # From the order of segments to that of a plan; back again at the end.
    state = _joined(plan.in_order(state), groups)

    reads: list[Tensor] = []
    ended: list[Tensor] = []
    for step in plan.steps:
        count = step.stop - step.start
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        reads.append(q[step] @ state)
        decayed = state.unflatten(-1, (-1, v.shape[-1])) * decay[step]
        state = decayed.flatten(-2) + added[step]

    read = _by_head(torch.cat(reads), heads)
    o = inside + read * from_start[..., None]
    states = _by_head(torch.cat((state, *reversed(ended))), heads)
    return plan.to_tokens(o), states[plan.row]


def _joined(x: Tensor, groups: int) -> Tensor:
    """x [...,H,K or C,V] as [...,G,K or C,H / G * V]: the heads of a group side by side, so that one
    product with what they share serves all."""
    return x.unflatten(1, (groups, -1)).transpose(2, 3).flatten(-2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_joined`."""
    shared = heads // x.shape[1]
    return x.unflatten(-1, (shared, -1)).transpose(2, 3).flatten(1, 2)


def state_space_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: (o fp32 [B,H,V], the next state) of q and k [B,G,K], v [B,H,V], g [B,H]
    and the state fp32 [B,H,K,V]."""
    shared = v.shape[1] // q.shape[1]
    q = q.float().repeat_interleave(shared, dim=1)
    k = k.float().repeat_interleave(shared, dim=1)
    state = state * g.float().exp()[..., None, None]
    state = state + k[..., None] * v.float()[..., None, :]
    return (state * q[..., None]).sum(-2), state

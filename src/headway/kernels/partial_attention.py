"""Attention to a part of the keys, in a form that can be merged: packed sequences of q, k and v
come in, o and its log-sum-exp go out.

Shapes: N query tokens, M key tokens, H query heads, KV key and value heads, hd head width.

    part i    o_i, lse_i of the keys of part i alone
    merged    lse = log sum exp(lse_i),   o = sum exp(lse_i - lse) o_i

The backward of one part takes the merged o and lse: its probabilities are exp(q k - lse), so that
the gradients of all parts add up to those of attention to all keys. FlashAttention computes both on
CUDA in 16 bits; elsewhere plain fp32 torch does, sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.kernels.attention import why_not


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of packed tokens begin and end: sequence i of the queries attends to
    sequence i of the keys."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    q_starts: Tensor
    """int32 [n + 1] on the device"""
    k_starts: Tensor
    causal: bool
    """Sequences of queries and keys are the same tokens; a query sees no later key."""

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[int, int]], device: torch.device, *, causal: bool
    ) -> Sequences:
        """From (queries, keys) of every sequence; one copy to the device, without waiting for
        it."""
        q_lengths, k_lengths = (tuple(pair[side] for pair in pairs) for side in (0, 1))
        starts = torch.tensor([(0, *q_lengths), (0, *k_lengths)]).cumsum(1).int()
        if device.type == "cuda":
            starts = starts.pin_memory().to(device, non_blocking=True)
        return cls(q_lengths, k_lengths, starts[0], starts[1], causal)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The tokens of every sequence: of its queries and of its keys."""
        q = 0
        k = 0
        for q_length, k_length in zip(self.q_lengths, self.k_lengths, strict=True):
            yield slice(q, q + q_length), slice(k, k + k_length)
            q = q + q_length
            k = k + k_length


def attend_part(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(o [N,H,hd], lse fp32 [H,N]) of q [N,H,hd] over k and v [M,KV,hd]."""
    if _uses_flash(q):
        longest = max(sequences.q_lengths), max(sequences.k_lengths)
        packing = (sequences.q_starts, sequences.k_starts, *longest)
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *packing, 0.0, sequences.causal, False
        )
        return o, lse
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for here, there in sequences.slices():
        scores = _scores(q[here], k[there], sequences.causal)
        lse[:, here] = scores.logsumexp(-1)
        o[here] = torch.einsum("hts,shd->thd", scores.softmax(-1), _per_query_head(v[there], q)).to(
            q.dtype
        )
    return o, lse


def attend_part_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, sequences: Sequences
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through one part, from the merged o [N,H,hd] and lse [H,N] and the
    gradient of that o."""
    if _uses_flash(q):
        longest = max(sequences.q_lengths), max(sequences.k_lengths)
        packing = (sequences.q_starts, sequences.k_starts, *longest)
        # The state of dropout's random numbers, which nothing reads at dropout 0.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            d_o,
            q,
            k,
            v,
            o,
            lse.contiguous(),
            *packing,
            0.0,
            sequences.causal,
            unused,
            unused.new_empty(0),
        )
    d_q = torch.empty_like(q)
    d_k = torch.empty_like(k)
    d_v = torch.empty_like(v)
    grouped = (k.shape[1], q.shape[1] // k.shape[1])
    for here, there in sequences.slices():
        weights = torch.exp(_scores(q[here], k[there], sequences.causal) - lse[:, here, None])
        d_o32 = d_o[here].float()
        # sum_s weight_s dweight_s over all parts is do . o of the merged o.
        delta = (d_o32 * o[here].float()).sum(-1).transpose(0, 1)[..., None]
        d_weights = torch.einsum("thd,shd->hts", d_o32, _per_query_head(v[there], q))
        d_scores = weights * (d_weights - delta) * q.shape[-1] ** -0.5
        d_q[here] = torch.einsum("hts,shd->thd", d_scores, _per_query_head(k[there], q)).to(q.dtype)
        # Query heads of a group share a key head, which gets the sum of their gradients.
        d_k[there] = (
            torch.einsum("hts,thd->shd", d_scores, q[here].float())
            .unflatten(1, grouped)
            .sum(2)
            .to(k.dtype)
        )
        d_v[there] = (
            torch.einsum("hts,thd->shd", weights, d_o32).unflatten(1, grouped).sum(2).to(v.dtype)
        )
    return d_q, d_k, d_v


def merge_part(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(o fp32 [N,H,hd], lse [H,N]) with one more part; an lse of -inf stands for no keys so far."""
    total = torch.logaddexp(lse, part_lse)
    weight, part_weight = (
        (part_sum - total).exp().transpose(0, 1)[..., None] for part_sum in (lse, part_lse)
    )
    return o * weight + part_o * part_weight, total


def _uses_flash(q: Tensor) -> bool:
    return not why_not("varlen", q.device.type, q.dtype, q.shape[-1])


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """fp32 [H, queries, keys]."""
    scores = torch.einsum("thd,shd->hts", q.float(), _per_query_head(k, q)) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    position = torch.arange(q.shape[0], device=q.device)
    return scores.masked_fill(position[:, None] < position, -torch.inf)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """fp32 [s,H,hd] of keys or values [s,KV,hd]: each head repeated for its group of queries."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], dim=1)

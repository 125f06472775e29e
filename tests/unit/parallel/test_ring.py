"""Ring attention computed rank by rank in one process, its exchanges played back, beside attention of whole rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.batches import make_batch

from headway.kernels.attention import mask_of, reference, visible
from headway.kernels.partial_attention import (
    Sequences,
    attend_part,
    attend_part_backward,
    merge_part,
)
from headway.parallel.ring import chunks_of, plan_parts, ring_order

CPU = torch.device("cpu")
LENGTH = 24
ROWS = [[24], [7, 5], [3, 3, 3, 15], [1, 1, 22], [12, 12], [6, 6, 6, 6]]


def test_every_rank_holds_as_many_early_tokens_as_late_ones() -> None:
    assert ring_order(8, 2) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ring_order(8, 1) == list(range(8))
    work = [sum(2 * chunk + 1 for chunk in chunks_of(rank, 4)) for rank in range(4)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_parts_of_all_steps_are_the_mask_of_whole_rows(ranks: int) -> None:
    mask = mask_of(make_batch(ROWS, seq_len=LENGTH, vocab=9, seed=0))
    order = torch.tensor(ring_order(LENGTH, ranks)).view(ranks, -1)
    seen = torch.zeros(len(ROWS), LENGTH, LENGTH, dtype=torch.int64)
    for rank, source in itertools.product(range(ranks), range(ranks)):
        each = LENGTH // ranks
        for part in plan_parts(mask.on_host(), LENGTH, rank, source, ranks, CPU):
            everything = torch.arange(len(ROWS) * each)
            q_index = everything if part.q_index is None else part.q_index
            k_index = everything if part.k_index is None else part.k_index
            assert len(set(q_index.tolist())) == len(q_index), (
                "a query stands in one sequence of a part"
            )
            for here, there in part.sequences.slices():
                for q, k in itertools.product(q_index[here].tolist(), k_index[there].tolist()):
                    if not part.sequences.causal or k <= q:
                        assert q // each == k // each, "both in the same row"
                        seen[q // each, order[rank, q % each], order[source, k % each]] += 1
    assert torch.equal(seen, visible(mask, None).long()), (
        "each pair of tokens that may see each other once, no other"
    )


@pytest.mark.parametrize("causal", [True, False])
def test_parts_merge_to_attention_to_all_keys(causal: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(9, 4, 8, generator=generator, dtype=torch.float32, requires_grad=True)
    k = torch.randn(9, 2, 8, generator=generator, dtype=torch.float32, requires_grad=True)
    v = torch.randn(9, 2, 8, generator=generator, dtype=torch.float32, requires_grad=True)
    more_k, more_v = (
        torch.randn(5, 2, 8, generator=generator, requires_grad=True) for _ in range(2)
    )
    sequences = Sequences.of([(9, 9)] if causal else [(4, 3), (5, 6)], CPU, causal=causal)
    more_sequences = Sequences.of([(9, 5)] if causal else [(4, 1), (5, 4)], CPU, causal=False)
    with torch.no_grad():
        o, lse = merge_part(
            *attend_part(q, k, v, sequences), *attend_part(q, more_k, more_v, more_sequences)
        )
    keys = []
    values = []
    masks = []
    for (here, first), (_, second) in zip(sequences.slices(), more_sequences.slices(), strict=True):
        keys.append(torch.cat([k[first], more_k[second]]))
        values.append(torch.cat([v[first], more_v[second]]))
        rows = torch.arange(here.stop - here.start)
        before = (
            rows[:, None] >= rows
            if causal
            else torch.ones(len(rows), first.stop - first.start, dtype=torch.bool)
        )
        masks.append(
            torch.cat(
                [before, torch.ones(len(rows), second.stop - second.start, dtype=torch.bool)], dim=1
            )
        )
    right = torch.cat(
        [
            reference(q[here][None], one_k[None], one_v[None], mask[None])[0]
            for (here, _), one_k, one_v, mask in zip(
                sequences.slices(), keys, values, masks, strict=True
            )
        ]
    )
    torch.testing.assert_close(o, right, rtol=1e-5, atol=1e-6)
    d_o = torch.randn(right.shape, generator=generator)
    right.backward(d_o)
    with torch.no_grad():
        first = attend_part_backward(d_o, q, k, v, o, lse, sequences)
        second = attend_part_backward(d_o, q, more_k, more_v, o, lse, more_sequences)
    for got, leaf in zip(
        (first[0] + second[0], *first[1:], *second[1:]), (q, k, v, more_k, more_v), strict=True
    ):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-4, atol=1e-5)

"""Mixing full and streaming heads: skipping what has weight 0 changes neither values nor gradients."""

from __future__ import annotations

import pytest
import torch
from support.batches import make_batch

from headway.kernels.attention import AttentionMask, attend, mask_of, reference, visible
from headway.kernels.head_mix import HeadMix, mix_heads
from headway.kernels.streaming import StreamingWindow, visible_streaming

T, KV, G = 40, 4, 3
REACH = (6, 3)
GATES = {
    "all three": [1.0, 0.0, 0.3, 0.9],
    "decided": [0.0, 1.0, 1.0, 0.0],
    "all full": [1.0] * 4,
    "all streaming": [0.0] * 4,
    "all both": [0.2, 0.5, 1e-7, 0.99],
    "full and both": [1.0, 0.5, 1.0, 0.1],
    "both and streaming": [0.0, 0.5, 0.0, 0.1],
}


def mask() -> AttentionMask:
    return mask_of(make_batch([[40], [9, 25, 4]], seq_len=T, vocab=9))


def inputs(gates: list[float], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, T, h, 8, generator=generator).to(dtype) for h in (KV * G, KV, KV)]
    return [x.requires_grad_() for x in [*qkv, torch.tensor([gates])]]


def mixed(
    given: list[torch.Tensor], *, skip: bool = True, heads: slice = slice(None)
) -> torch.Tensor:
    q, k, v, z = given
    mix = HeadMix.of(z, z.detach(), StreamingWindow(*REACH), skip=skip, heads=heads)
    seen = mask()
    return mix_heads(q, k, v, seen, mix, 0, full=lambda q, k, v: attend(q, k, v, seen))


def naive(given: list[torch.Tensor]) -> torch.Tensor:
    """Both branches for all heads under dense masks, mixed in plain torch."""
    q, k, v, z = given
    weight = z[0].repeat_interleave(G)[:, None]
    full, near = (
        reference(q, k, v, seen)
        for seen in (visible(mask(), None), visible_streaming(mask(), StreamingWindow(*REACH)))
    )
    return (weight * full.float() + (1 - weight) * near.float()).to(q.dtype)


def gradients(o: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    (o.float() * torch.randn(o.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in given]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES.keys())
def test_skipping_branches_gives_values_and_gradients_of_the_naive_mix(
    gates: list[float], skip: bool
) -> None:
    ours, theirs = inputs(gates), inputs(gates)
    o, right = mixed(ours, skip=skip), naive(theirs)
    torch.testing.assert_close(o, right, rtol=1e-4, atol=1e-5)
    undecided = torch.tensor([[0 < z < 1 for z in gates]])
    for name, got, wanted in zip("qkvz", gradients(o, ours), gradients(right, theirs), strict=True):
        # a decided gate was clamped: what reaches its z goes no further, so it need not be known
        if name == "z" and skip:
            assert (got[~undecided] == 0).all()
            got, wanted = got[undecided], wanted[undecided]
        torch.testing.assert_close(
            got, wanted, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_mixing_in_16_bits_stays_near_the_naive_mix() -> None:
    ours, theirs = (
        inputs(GATES["all three"], torch.bfloat16),
        inputs(GATES["all three"], torch.bfloat16),
    )
    o, right = mixed(ours), naive(theirs)
    torch.testing.assert_close(o.float(), right.float(), rtol=3e-2, atol=3e-2)
    for got, wanted in zip(gradients(o, ours), gradients(right, theirs), strict=True):
        if got.dtype == torch.bfloat16:
            torch.testing.assert_close(got.float(), wanted.float(), rtol=5e-2, atol=5e-2)


def test_each_head_runs_only_the_branch_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    from headway.kernels import head_mix

    real = head_mix.stream
    monkeypatch.setattr(
        head_mix,
        "stream",
        lambda q, k, v, *a, **b: (seen.update(streaming=k.shape[2]), real(q, k, v, *a, **b))[1],
    )
    q, k, v, z = inputs(GATES["all three"])
    mix = HeadMix.of(z, z.detach(), StreamingWindow(*REACH))

    def full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.update(full=k.shape[2], queries=q.shape[2])
        return attend(q, k, v, mask())

    mix_heads(q, k, v, mask(), mix, 0, full=full)
    assert seen == {"full": 3, "streaming": 3, "queries": 3 * G}


def test_a_rank_with_a_slice_of_heads_computes_that_slice_of_the_whole() -> None:
    q, k, v, z = inputs(GATES["all three"])
    whole = mixed([q, k, v, z])
    for first in (0, 2):
        part = mixed(
            [
                q[:, :, first * G : (first + 2) * G],
                k[:, :, first : first + 2],
                v[:, :, first : first + 2],
                z,
            ],
            heads=slice(first, first + 2),
        )
        torch.testing.assert_close(part, whole[:, :, first * G : (first + 2) * G])


def test_frozen_weights_ask_for_the_gradient_of_the_gates_alone() -> None:
    given = inputs(GATES["all three"])
    frozen = [x.detach() for x in given[:3]]
    right = gradients(naive(given), given)[3]
    z = given[3].detach().requires_grad_()
    o = mixed([*frozen, z])
    assert gradients(o, [z])[0][0, 2:].tolist() == pytest.approx(right[0, 2:].tolist(), rel=1e-4)

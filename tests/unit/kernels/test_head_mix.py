"""Mixing full and streaming heads: skipping what has weight 0 changes neither values nor gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.batches import make_batch

from headway.kernels.attention import AttentionMask, attend, mask_of, reference, visible
from headway.kernels.head_mix import HeadMix, mix_heads
from headway.kernels.streaming import StreamingWindow, visible_streaming

T = 40
KV = 4
G = 3
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
    operands: list[torch.Tensor], *, skip: bool = True, heads: slice = slice(None)
) -> torch.Tensor:
    q, k, v, z = operands
    mix = HeadMix.of(z, z.detach(), StreamingWindow(*REACH), skip=skip, heads=heads)
    seen = mask()
    return mix_heads(q, k, v, seen, mix, 0, full=lambda q, k, v: attend(q, k, v, seen))


def naive(operands: list[torch.Tensor]) -> torch.Tensor:
    """Both branches for all heads under dense masks, mixed in plain torch."""
    q, k, v, z = operands
    full = reference(q, k, v, visible(mask(), None))
    near = reference(q, k, v, visible_streaming(mask(), StreamingWindow(*REACH)))
    weight = z[0].repeat_interleave(G)[:, None]
    return (weight * full.float() + (1 - weight) * near.float()).to(q.dtype)


def gradients(o: torch.Tensor, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    (o.float() * torch.randn(o.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in operands]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("gates", GATES.values(), ids=GATES.keys())
def test_skipping_branches_gives_values_and_gradients_of_the_naive_mix(
    gates: list[float], skip: bool
) -> None:
    ours = inputs(gates)
    reference = inputs(gates)
    o = mixed(ours, skip=skip)
    right = naive(reference)
    torch.testing.assert_close(o, right, rtol=1e-4, atol=1e-5)
    undecided = torch.tensor([[0 < z < 1 for z in gates]])
    for name, got, wanted in zip(
        "qkvz", gradients(o, ours), gradients(right, reference), strict=True
    ):
        # a decided gate was clamped: what reaches its z goes no further, so it need not be known
        if name == "z" and skip:
            assert (got[~undecided] == 0).all()
            got = got[undecided]
            wanted = wanted[undecided]
        torch.testing.assert_close(
            got, wanted, rtol=1e-4, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_mixing_in_16_bits_stays_near_the_naive_mix() -> None:
    ours = inputs(GATES["all three"], torch.bfloat16)
    reference = inputs(GATES["all three"], torch.bfloat16)
    o = mixed(ours)
    right = naive(reference)
    torch.testing.assert_close(o.float(), right.float(), rtol=3e-2, atol=3e-2)
    for got, wanted in zip(gradients(o, ours), gradients(right, reference), strict=True):
        if got.dtype == torch.bfloat16:
            torch.testing.assert_close(got.float(), wanted.float(), rtol=5e-2, atol=5e-2)


def test_each_head_runs_only_the_branch_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.kernels import head_mix

    num_heads: dict[str, int] = {}
    stream = head_mix.stream

    def counting_stream(q: torch.Tensor, k: torch.Tensor, *more: Any, **options: Any) -> Any:
        num_heads["streaming"] = k.shape[2]
        return stream(q, k, *more, **options)

    def counting_full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        num_heads["full"] = k.shape[2]
        num_heads["queries"] = q.shape[2]
        return attend(q, k, v, mask())

    monkeypatch.setattr(head_mix, "stream", counting_stream)
    q, k, v, z = inputs(GATES["all three"])
    mix = HeadMix.of(z, z.detach(), StreamingWindow(*REACH))
    mix_heads(q, k, v, mask(), mix, 0, full=counting_full)
    assert num_heads == {"full": 3, "streaming": 3, "queries": 3 * G}


@pytest.mark.parametrize("first", [0, 2])
def test_a_rank_with_a_slice_of_heads_computes_that_slice_of_the_whole(first: int) -> None:
    q, k, v, z = inputs(GATES["all three"])
    kv_heads = slice(first, first + 2)
    q_heads = slice(first * G, (first + 2) * G)
    whole = mixed([q, k, v, z])
    part = mixed([q[:, :, q_heads], k[:, :, kv_heads], v[:, :, kv_heads], z], heads=kv_heads)
    torch.testing.assert_close(part, whole[:, :, q_heads])


def test_frozen_weights_ask_for_the_gradient_of_the_gates_alone() -> None:
    operands = inputs(GATES["all three"])
    frozen = [x.detach() for x in operands[:3]]
    right = gradients(naive(operands), operands)[3]
    z = operands[3].detach().requires_grad_()
    o = mixed([*frozen, z])
    assert gradients(o, [z])[0][0, 2:].tolist() == pytest.approx(right[0, 2:].tolist(), rel=1e-4)

"""Ranks with some rows of the head each: losses, per-token scores and gradients are those of the whole head."""

import pytest
import torch
from support.vocab_ranks import EmulatedVocab

from headway.kernels.cross_entropy import Shaping, linear_nll, linear_scores

TOKENS = 23
WIDTH = 8
CHUNK = 10


def made(vocab: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, WIDTH, generator=generator, requires_grad=True)
    targets = torch.randint(vocab, (TOKENS,), generator=generator)
    targets[:3] = torch.tensor([0, vocab - 1, vocab // 2])
    return hidden, weight, targets, torch.rand(TOKENS, generator=generator)


@pytest.mark.parametrize(("vocab", "ranks"), [(32, 2), (37, 4), (7, 7)])
@pytest.mark.parametrize("shaping", [Shaping(), Shaping(0.1, 1e-2)], ids=["plain", "shaped"])
def test_the_loss_of_all_ranks_is_that_of_the_whole_head(
    vocab: int, ranks: int, shaping: Shaping
) -> None:
    hidden, weight, targets, coefficients = made(vocab)
    right = linear_nll(hidden, weight, targets, coefficients, shaping, CHUNK)
    right.total.backward()
    emulated = EmulatedVocab(hidden, weight, targets, CHUNK, ranks)
    d_hidden = torch.zeros_like(hidden)
    for rank, part in enumerate(emulated.weights):
        local_hidden = hidden.detach().requires_grad_()
        got = linear_nll(
            local_hidden, part, targets, coefficients, shaping, CHUNK, shard=emulated.shard(rank)
        )
        torch.testing.assert_close(tuple(got), tuple(right), rtol=1e-5, atol=1e-6)
        got.total.backward()
        d_hidden += local_hidden.grad
    torch.testing.assert_close(d_hidden, hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([part.grad for part in emulated.weights]), weight.grad, rtol=1e-4, atol=1e-5
    )


def test_scores_of_all_ranks_are_those_of_the_whole_head() -> None:
    hidden, weight, targets, coefficients = made(37)

    def loss(log_prob: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return (log_prob.exp() * coefficients).sum() + lse.square().sum()

    right = linear_scores(hidden, weight, targets, CHUNK)
    loss(*right).backward()
    emulated = EmulatedVocab(hidden, weight, targets, CHUNK, 3)
    d_hidden = torch.zeros_like(hidden)
    for rank, part in enumerate(emulated.weights):
        local_hidden = hidden.detach().requires_grad_()
        got = linear_scores(local_hidden, part, targets, CHUNK, emulated.shard(rank))
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)
        loss(*got).backward()
        d_hidden += local_hidden.grad
    torch.testing.assert_close(d_hidden, hidden.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([part.grad for part in emulated.weights]), weight.grad, rtol=1e-4, atol=1e-5
    )

"""Functions of tokens in blocks of one size: the same numbers, and the same bits however many tokens there are."""

import torch

from headway.kernels.row_blocks import ROWS, by_rows, place_matters, row_log_probs, row_logits

GENERATOR = torch.Generator().manual_seed(2)
WEIGHT = torch.randn(77, 24, generator=GENERATOR)
HIDDEN = torch.randn(3 * ROWS + 5, 24, generator=GENERATOR)


def test_results_are_those_of_the_function_and_keep_their_order() -> None:
    sums, products = by_rows(lambda x, y: (x + y, x * y), HIDDEN, HIDDEN.flip(0))
    assert torch.equal(sums, HIDDEN + HIDDEN.flip(0))
    assert torch.equal(products, HIDDEN * HIDDEN.flip(0))


def test_the_function_only_sees_full_blocks() -> None:
    seen: list[int] = []
    by_rows(lambda x: seen.append(len(x)) or x, HIDDEN)
    assert seen == [ROWS] * 4


def test_log_probabilities_have_the_same_bits_alone_and_among_others() -> None:
    targets = torch.arange(len(HIDDEN)) % 77
    logits = row_logits(HIDDEN, WEIGHT)
    scores = row_log_probs(logits, targets)
    torch.testing.assert_close(logits, HIDDEN @ WEIGHT.t())
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    for some in ([3], [40, 2, 90], list(range(50))):
        alone = row_logits(HIDDEN[some], WEIGHT)
        assert torch.equal(alone, logits[some])
        assert torch.equal(row_log_probs(alone, targets[some]), scores[some])


def test_gradients_are_those_of_the_function() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    weight = WEIGHT.clone().requires_grad_()
    toward = torch.cos(torch.arange(len(HIDDEN) * 77)).view(-1, 77)
    found = torch.autograd.grad((row_logits(hidden, weight) * toward).sum(), (hidden, weight))
    right = torch.autograd.grad(((hidden @ weight.t()) * toward).sum(), (hidden, weight))
    for gradient, plain in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, plain, rtol=1e-4, atol=1e-4)


def test_a_function_that_depends_on_the_place_in_the_block_is_found() -> None:
    block = HIDDEN[:ROWS]
    assert not place_matters(lambda x: x * 2, block)
    assert place_matters(lambda x: x.cumsum(0), block)

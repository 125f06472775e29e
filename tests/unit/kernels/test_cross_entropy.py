"""The chunked head loss against torch's cross-entropy and against autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.cross_entropy import Shaping, linear_nll, linear_scores


def problem(
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(37, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 50, (37,), generator=generator)
    coefficients = torch.rand(37, generator=generator, dtype=torch.float32) * (
        torch.arange(37) % 3 != 0
    )
    return hidden, weight, targets, coefficients


def plain_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    c: torch.Tensor,
    shaping: Shaping,
) -> torch.Tensor:
    logits = hidden @ weight.t()
    loss = F.cross_entropy(
        logits, targets, reduction="none", label_smoothing=shaping.label_smoothing
    )
    return ((loss + shaping.z_loss * logits.logsumexp(-1).square()) * c).sum()


@pytest.mark.parametrize(
    "shaping", [Shaping(), Shaping(0.1), Shaping(0.0, 0.01), Shaping(0.2, 0.03)]
)
@pytest.mark.parametrize("chunk", [8, 37, 100])
def test_one_pass_loss_and_gradients_equal_plain_cross_entropy(
    shaping: Shaping, chunk: int
) -> None:
    hidden, weight, targets, c = problem(torch.float32)
    expected = plain_loss(hidden, weight, targets, c, shaping)
    expected.backward()
    reference = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    out = linear_nll(hidden, weight, targets, c, shaping, chunk)
    (out.total * 0.5).backward()
    torch.testing.assert_close(out.total, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, reference[0] * 0.5, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, reference[1] * 0.5, rtol=1e-4, atol=1e-6)
    logits = hidden @ weight.t()
    torch.testing.assert_close(
        out.nll, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(out.correct.bool(), logits.argmax(-1) == targets)


def test_recomputed_scores_have_the_gradients_of_any_loss_on_them() -> None:
    hidden, weight, targets, _ = problem(torch.float32)
    logits = hidden @ weight.t()
    log_prob = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    expected = (log_prob.square() + 0.3 * logits.logsumexp(-1).sin()).sum()
    expected.backward()
    reference = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    scored, lse = linear_scores(hidden, weight, targets, 10)
    loss = (scored.square() + 0.3 * lse.sin()).sum()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, reference[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight.grad, reference[1], rtol=1e-4, atol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight, targets, c = problem(torch.float32)
    frozen = weight.detach()
    linear_nll(hidden, frozen, targets, c).total.backward()
    assert hidden.grad is not None
    assert frozen.grad is None


def test_bf16_logits_stay_close_to_fp32() -> None:
    hidden, weight, targets, c = problem(torch.float32)
    exact = linear_nll(hidden, weight, targets, c).total
    low = linear_nll(hidden.bfloat16(), weight.bfloat16(), targets, c).total
    torch.testing.assert_close(low, exact, rtol=2e-2, atol=2e-2)

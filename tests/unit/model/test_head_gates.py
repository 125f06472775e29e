"""Head gates: the statistics of hard concrete samples, their gradients, and what they settle to."""

from __future__ import annotations

import pytest
import torch

from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.head_gates import (
    HIGH,
    LOW,
    TEMPERATURE,
    HeadGates,
    along_sparsity,
    expected_z,
    hold,
    probability_one,
    probability_zero,
    sample,
    settle,
    slope_of_expected_z,
)
from headway.model.init import initial_value
from headway.model.layout import DECIDED, GATES, ParamSpec, param_specs
from headway.model.transformer import Transformer

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    ffn_size=16,
    vocab_size=32,
    head_gates=HeadGatesConfig(),
)
TABLE = {
    4.5: (0.985, 0.002, 0.948),
    4.0: (0.976, 0.004, 0.917),
    2.0: (0.857, 0.027, 0.599),
    1.0: (0.706, 0.069, 0.355),
    0.0: (0.499, 0.168, 0.168),
    -1.0: (0.293, 0.355, 0.069),
    -2.0: (0.143, 0.599, 0.027),
    -4.0: (0.024, 0.917, 0.004),
    -10.0: (0.0, 0.9998, 0.0),
}


@pytest.mark.parametrize(("log_alpha", "row"), TABLE.items())
def test_closed_forms_and_samples_have_the_published_statistics(
    log_alpha: float, row: tuple[float, float, float]
) -> None:
    alpha = torch.full((), log_alpha, dtype=torch.float64)
    for closed, right in zip((expected_z, probability_zero, probability_one), row, strict=True):
        assert float(closed(alpha)) == pytest.approx(right, abs=1.1e-3)
    z, _ = sample(torch.full((200_000,), log_alpha), seed=int(log_alpha * 10) + 200)
    for seen, right in zip(
        (z.mean(), (z == 0).float().mean(), (z == 1).float().mean()), row, strict=True
    ):
        assert float(seen) == pytest.approx(right, abs=4e-3)


def test_the_slope_of_a_sample_is_its_derivative_and_zero_where_it_was_clamped() -> None:
    log_alpha = torch.linspace(-4, 4, 500)
    z, slope = sample(log_alpha, seed=5)
    generator = torch.Generator().manual_seed(5)
    u = torch.rand(log_alpha.shape, generator=generator, dtype=torch.float64) * (1 - 2e-8) + 1e-8
    alpha = log_alpha.double().requires_grad_()
    plain = (LOW + (HIGH - LOW) * torch.sigmoid((torch.logit(u) + alpha) / TEMPERATURE)).clamp(0, 1)
    plain.sum().backward()
    assert alpha.grad is not None
    torch.testing.assert_close(z, plain.detach().float())
    torch.testing.assert_close(slope, alpha.grad.float())
    assert (slope[(z == 0) | (z == 1)] == 0).all()
    assert ((z == 0) | (z == 1)).float().mean() > 0.3


def test_noise_depends_on_the_seed_alone() -> None:
    alpha = torch.zeros(3, 4)
    assert torch.equal(sample(alpha, 7)[0], sample(alpha, 7)[0])
    assert not torch.equal(sample(alpha, 7)[0], sample(alpha, 8)[0])


def gates(log_alpha: torch.Tensor) -> HeadGates:
    head_gates = HeadGates(CONFIG)
    with torch.no_grad():
        head_gates.log_alpha.copy_(log_alpha)
    return head_gates


def test_a_draw_has_the_samples_values_and_its_gradient() -> None:
    head_gates = gates(torch.linspace(-3, 3, 12).view(3, 4))
    draw = head_gates.draw(head_gates(), seed=11)
    z, slope = sample(head_gates.log_alpha.detach(), 11)
    assert torch.equal(draw.z, z)
    weight = torch.arange(12.0).view(3, 4)
    (draw.z * weight).sum().backward()
    assert head_gates.log_alpha.grad is not None
    torch.testing.assert_close(head_gates.log_alpha.grad, slope * weight)


def test_a_slice_of_heads_draws_the_noise_of_all_of_them() -> None:
    head_gates = gates(torch.zeros(3, 4))
    whole = head_gates.draw(head_gates(), seed=3)
    head_gates.heads = slice(2, 4)
    part = head_gates.draw(head_gates(), seed=3)
    assert torch.equal(part.z, whole.z)
    assert torch.equal(torch.stack([layer.z for layer in part.mix.layers]), whole.z[:, 2:])


def test_gates_that_do_not_train_and_evaluation_are_settled_without_noise() -> None:
    values = torch.tensor([[9.0, -9, 3, -3], [9, 9, -9, -9], [-9, -9, -9, 8]])
    head_gates = gates(values)
    settled = head_gates.draw(head_gates(), seed=None).z
    assert settled.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    head_gates.log_alpha.requires_grad_(False)
    assert torch.equal(head_gates.draw(head_gates(), seed=3).z, settled)


def test_settling_streams_as_many_heads_as_the_gates_expect_the_lowest_first() -> None:
    alpha = torch.tensor([[0.3, 0.2, 0.1, 0.0], [-0.1, -0.2, -0.3, -0.4]])
    assert settle(alpha).tolist() == [[True] * 4, [False] * 4]
    assert settle(torch.full((2, 4), 4.0)).all()
    full = [[True, False], [False, False]]
    assert settle(torch.where(torch.tensor(full), DECIDED, -DECIDED)).tolist() == full


def test_gates_begin_nearly_full_or_striped_and_belong_to_the_model() -> None:
    first = initial_value(ParamSpec(GATES, (30, 40), start="gates"), CONFIG, 0)
    assert float(first.mean()) == pytest.approx(4.0, abs=2e-3)
    assert float(first.std()) == pytest.approx(0.01, rel=0.1)
    stripes = CONFIG.with_(head_gates=HeadGatesConfig(stripe=True))
    striped = initial_value(ParamSpec(GATES, (3, 4), start="gates"), stripes, 0)
    assert striped.tolist() == [[10.0] * 4, [-10.0] * 4, [10.0] * 4]
    with torch.device("meta"):
        names = [(name, tuple(p.shape)) for name, p in Transformer(CONFIG).named_parameters()]
    assert names == [(spec.name, spec.shape) for spec in param_specs(CONFIG)]
    assert names[0] == (GATES, (3, 4))


def test_every_attention_kernel_has_one_of_streaming_to_go_with_it() -> None:
    from headway.kernels import attention, streaming
    from headway.model.transformer import STREAMING

    assert set(STREAMING) == {"auto", *attention.BACKENDS}
    assert set(STREAMING.values()) == {"auto", *streaming.BACKENDS}


def test_gates_and_sliding_windows_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="head_gates is given with sliding_window=4"):
        CONFIG.with_(sliding_window=4)


@pytest.mark.parametrize("target", [0.0, 0.1, 0.5, 0.7, 1.0])
def test_held_gates_expect_their_target_and_keep_their_order(target: float) -> None:
    log_alpha = torch.randn(3, 30, generator=torch.Generator().manual_seed(1)) * 5
    held = hold(log_alpha, target)
    # no finite shift makes all gates certain; what they settle to is exact
    assert float(1 - expected_z(held.double()).mean()) == pytest.approx(target, abs=0.4 / 90 + 1e-6)
    assert int((~settle(held)).sum()) == round(90 * target)
    shift = held - log_alpha
    torch.testing.assert_close(shift, shift.mean().expand_as(shift), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hold(held, target), held, rtol=1e-5, atol=1e-5)


def test_gates_that_are_not_finite_are_left_alone() -> None:
    broken = torch.tensor([[0.0, float("nan")]])
    assert hold(broken, 0.5) is broken


def test_the_slope_of_the_mean_is_its_derivative() -> None:
    alpha = torch.linspace(-6, 6, 50, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(expected_z(alpha).sum(), alpha)
    torch.testing.assert_close(slope_of_expected_z(alpha.detach()), slope)


def test_the_gradient_of_held_gates_is_that_of_the_loss_after_the_shift() -> None:
    """Central differences of a loss of held gates, whose shift depends on every gate."""
    alpha = torch.tensor([-2.0, -0.5, 0.3, 1.5, 6.0], dtype=torch.float64)
    gains = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.7], dtype=torch.float64)
    target = float(1 - expected_z(alpha).mean())

    def loss(gates: torch.Tensor) -> float:
        return float((gains * expected_z(hold(gates.float(), target).double())).sum())

    moved = alpha.clone().requires_grad_()
    slopes = slope_of_expected_z(alpha)
    zero = along_sparsity(moved - alpha, slopes)
    (got,) = torch.autograd.grad((gains * slopes * zero).sum(), moved)
    step = 1e-2
    for index in range(len(alpha)):
        change = torch.zeros_like(alpha)
        change[index] = step
        difference = (loss(alpha + change) - loss(alpha - change)) / (2 * step)
        assert float(got[index]) == pytest.approx(difference, abs=2e-4)


def test_a_draw_of_held_gates_has_that_gradient() -> None:
    gates = HeadGates(CONFIG)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.linspace(-2, 2, 12).view(3, 4))
    on_host = gates()
    draw = gates.draw(on_host, 3, is_held=True)
    plain = gates.draw(on_host, 3)
    assert torch.equal(draw.z, plain.z)
    weights = torch.arange(12.0).view(3, 4)
    (got,) = torch.autograd.grad((weights * draw.z).sum(), gates.log_alpha)
    (unheld,) = torch.autograd.grad((weights * plain.z).sum(), gates.log_alpha)
    slopes = slope_of_expected_z(on_host)
    torch.testing.assert_close(got, unheld - slopes * unheld.sum() / slopes.sum())
    assert float(got.sum()) == pytest.approx(0.0, abs=1e-4)

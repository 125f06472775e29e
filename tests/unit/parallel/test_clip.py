"""What gradients are divided by, in numbers counted by hand: the norm means the gradients without the loss scale."""

import math

import pytest
import torch

from headway.parallel.base import clip_guard


@pytest.mark.parametrize(
    ("scaled_norm", "clip", "scale", "norm", "divisor"),
    [
        (8.0, 1.0, 4.0, 2.0, 8.0),  # a norm of 2 is halved; the scale goes too
        (
            2.0,
            1.0,
            4.0,
            0.5,
            4.0,
        ),  # below the clip nothing but the scale goes: small gradients stay small
        (0.5, 1.0, 1.0, 0.5, 1.0),
        (3.0, 1.5, 1.0, 3.0, 2.0),
        (65536.0, 2.0, 65536.0, 1.0, 65536.0),  # only the scale makes this norm large
        (8.0, None, 4.0, 2.0, 4.0),
    ],
)
def test_gradients_above_the_clip_come_down_to_it_and_the_others_stay(
    scaled_norm: float, clip: float | None, scale: float, norm: float, divisor: float
) -> None:
    seen, guard, overflow = clip_guard(torch.tensor(scaled_norm), clip, torch.tensor(scale))
    assert (float(seen), float(overflow), float(guard.found_inf)) == (norm, 0.0, 0.0)
    assert float(guard.scale) == pytest.approx(divisor, rel=2e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_skips_the_step_and_is_an_overflow(bad: float) -> None:
    _, guard, overflow = clip_guard(torch.tensor(bad), 1.0, torch.tensor(8.0))
    assert float(guard.found_inf) == float(overflow) == 1.0
    assert math.isfinite(float(guard.scale))


def test_a_step_skipped_on_purpose_is_no_overflow() -> None:
    _, guard, overflow = clip_guard(torch.tensor(2.0), 1.0, torch.tensor(1.0), torch.tensor(1.0))
    assert float(guard.found_inf) == 1.0 and float(overflow) == 0.0
    _, guard, _ = clip_guard(torch.tensor(2.0), 1.0, torch.tensor(1.0), torch.tensor(0.0))
    assert float(guard.found_inf) == 0.0

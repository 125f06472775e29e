"""Learning-rate and beta2 schedules at known points."""

import pytest

from headway.errors import ConfigError
from headway.optim.schedule import Schedule, beta2_at


def test_internlm_warmup_points_are_reproduced() -> None:
    schedule = Schedule(kind="cosine", warmup=500, floor=0.0)
    assert [schedule.factor(t, 50_000) * 1e-4 for t in (1, 2, 3)] == pytest.approx(
        [4e-7, 6e-7, 8e-7]
    )


def test_zero_steps_then_warmup_then_cosine_to_the_floor() -> None:
    schedule = Schedule(kind="cosine", warmup=0.1, floor=0.1, zero_steps=5)
    factors = [schedule.factor(t, 105) for t in range(106)]
    assert factors[:5] == [0.0] * 5
    assert factors[14] == pytest.approx(1.0)
    assert factors[15] == pytest.approx(1.0)
    assert factors[105] == pytest.approx(0.1)
    assert factors[60] == pytest.approx(0.1 + 0.9 * 0.5)


def test_linear_falls_evenly_and_constant_stays() -> None:
    linear = Schedule(kind="linear", warmup=0, floor=0.0)
    assert [linear.factor(t, 4) for t in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert Schedule(kind="constant", warmup=2).factor(90, 100) == 1.0


def test_wsd_stays_at_the_peak_and_falls_at_the_end() -> None:
    wsd = Schedule(kind="wsd", warmup=2, decay=4, floor=0.0)
    assert [wsd.factor(t, 10) for t in range(11)] == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]
    )
    share = Schedule(kind="wsd", warmup=2, decay=0.4, floor=0.0)
    assert [share.factor(t, 10) for t in range(11)] == [wsd.factor(t, 10) for t in range(11)]
    sqrt = Schedule(kind="wsd", warmup=2, decay=4, decay_shape="sqrt", floor=0.2)
    assert [sqrt.factor(t, 10) for t in (6, 7, 10, 99)] == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert Schedule(kind="wsd", warmup=0, decay=0).factor(9, 10) == 1.0


def test_a_fall_that_does_not_fit_behind_the_warmup_is_refused_at_the_first_step() -> None:
    with pytest.raises(
        ConfigError,
        match="decay is 8 steps; after zero_steps and warm-up \\(3\\) only 7 of 10 steps are left",
    ):
        Schedule(kind="wsd", warmup=2, zero_steps=1, decay=8).factor(0, 10)
    with pytest.raises(ConfigError, match=r"schedule\.decay is 1\.5; a fraction"):
        Schedule(kind="wsd", decay=1.5).factor(0, 10)


def test_a_warmup_fraction_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="fraction"):
        Schedule(warmup=1.5).factor(0, 10)


def test_beta2_rises_only_when_asked() -> None:
    assert beta2_at(0.95, 0.0, 1000) == 0.95
    assert beta2_at(0.95, 0.8, 0) == 0.95
    assert beta2_at(0.95, 0.8, 999) == pytest.approx(1 - 1000**-0.8)

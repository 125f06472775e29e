"""The rule for spikes in numbers counted by hand: the mean and spread of 1, 2, 3 are 2 and 0.8165."""

import math

import pytest
import torch

from headway.train.config import HealConfig
from headway.train.health import NOT_FINITE, SPIKE, LossMonitor


def verdicts(losses: list[float], **settings: object) -> tuple[list[int], LossMonitor]:
    monitor = LossMonitor(
        HealConfig.model_validate({"window": 3, "sigma": 2.0, **settings}), torch.device("cpu")
    )
    return [int(monitor.judge(torch.tensor(loss))) for loss in losses], monitor


def test_nothing_is_judged_before_the_window_is_full_and_the_next_loss_is() -> None:
    assert verdicts([1.0, 2.0, 100.0])[0] == [0, 0, 0]
    # 2 + 2 * 0.8165 = 3.633
    assert verdicts([1.0, 2.0, 3.0, 3.64])[0] == [0, 0, 0, SPIKE]
    assert verdicts([1.0, 2.0, 3.0, 3.63])[0] == [0, 0, 0, 0]


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_spike_that_is_skipped_or_undone_does_not_enter_the_window(action: str) -> None:
    seen, monitor = verdicts([1.0, 2.0, 3.0, 50.0, 50.0, 50.0, 50.0, 2.0], on_spike=action)
    assert seen == [0, 0, 0, SPIKE, SPIKE, SPIKE, SPIKE, 0]
    # the newest good loss took the place of the oldest
    assert monitor.scalars() == {
        "count": 4,
        "losses": [2.0, 2.0, 3.0],
    }


def test_a_spike_that_is_only_reported_enters_the_window() -> None:
    seen, monitor = verdicts([1.0, 2.0, 3.0, 50.0, 50.0], on_spike="alert")
    assert seen == [0, 0, 0, SPIKE, 0]  # 50 is within two deviations of 2, 3 and 50
    assert monitor.scalars() == {"count": 5, "losses": [50.0, 50.0, 3.0]}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_at_once_and_never_enters(bad: float) -> None:
    seen, monitor = verdicts([bad, 1.0, bad, 2.0, 3.0, bad])
    assert seen == [NOT_FINITE, 0, NOT_FINITE, 0, 0, NOT_FINITE]
    assert monitor.scalars() == {"count": 3, "losses": [1.0, 2.0, 3.0]}


def test_a_flat_curve_has_no_spikes_within_one_percent_per_sigma() -> None:
    assert verdicts([5.0, 5.0, 5.0, 5.09])[0][-1] == 0  # 5 + 2 * 0.05 = 5.1
    assert verdicts([5.0, 5.0, 5.0, 5.11])[0][-1] == SPIKE


def test_only_a_spike_that_is_to_be_skipped_skips_the_update() -> None:
    for action, skips in (("alert", None), ("rollback", None), ("skip", [0.0, 1.0, 0.0])):
        monitor = verdicts([], on_spike=action)[1]
        skipped = [monitor.skips(torch.tensor(verdict)) for verdict in (0, SPIKE, NOT_FINITE)]
        assert [None if skip is None else float(skip) for skip in skipped] == (skips or [None] * 3)


def test_a_window_comes_back_from_a_checkpoint_and_one_of_another_length_begins_anew() -> None:
    _, monitor = verdicts([1.0, 2.0, 3.0, 2.5])
    again = verdicts([])[1]
    again.load(monitor.scalars())
    assert again.scalars() == monitor.scalars() == {"count": 4, "losses": [2.5, 2.0, 3.0]}
    other = verdicts([], window=4)[1]
    other.load(monitor.scalars())
    assert other.scalars() == {"count": 0, "losses": [0.0] * 4}

"""Slow ranks stand out by InternLM's rule."""

import pytest

from headway.diagnose.slow_ranks import (
    RankTimes,
    SlowRule,
    slow_in_training,
    slow_ranks,
    slower_than_before,
    usual,
    write_report,
)

RULE = SlowRule(1.1, 0.5)


def test_up_to_four_ranks_the_mean_counts_all() -> None:
    assert usual([1.0, 1.0, 1.0, 5.0]) == 2.0


def test_above_four_ranks_the_extremes_are_left_out() -> None:
    assert usual([0.1, 1.0, 1.0, 1.0, 9.0]) == 1.0


@pytest.mark.parametrize(("slow", "flagged"), [(1.05, False), (1.2, True)])
def test_a_rank_stands_out_above_the_ratio(slow: float, flagged: bool) -> None:
    times = {"compute": [1.0, 1.0, slow, 1.0, 1.0, 1.0]}
    flagged_ranks = slow_ranks(times, RULE)
    assert [rank.rank for rank in flagged_ranks] == ([2] if flagged else [])
    report = write_report(times, flagged_ranks, RULE)
    assert ("rank 2: compute took 1.200 s, 1.20 times the ranks' mean" in report) is flagged
    assert ("no rank is slow" in report) is not flagged


def test_short_times_never_stand_out() -> None:
    assert slow_ranks({"data wait": [0.1, 0.1, 0.9, 0.1, 0.1]}, RULE) == []
    assert slow_ranks({"compute": [2.0]}, RULE) == []


def test_a_rank_is_compared_to_its_own_last_ten() -> None:
    (slow,) = slower_than_before("a step", 3, [9.0, *[1.0] * 10, 2.0], RULE)
    assert (slow.rank, slow.usual) == (3, 1.0)
    assert slower_than_before("a step", 3, [1.0] * 11, RULE) == []
    assert slower_than_before("a step", 3, [1.0], RULE) == []


def ranks_of(compute: list[float], waits: list[float], num_steps: int = 10) -> list[RankTimes]:
    """RankGroups whose steps end together, as long as the slowest takes."""
    total = max(seconds + wait for seconds, wait in zip(compute, waits, strict=True))
    return [
        RankTimes(seconds, wait, total, num_steps, "node-a")
        for seconds, wait in zip(compute, waits, strict=True)
    ]


def test_in_training_the_rank_that_computes_longer_is_named_though_all_steps_end_together() -> None:
    slow = slow_in_training(ranks_of([1.0, 1.0, 1.4, 1.0, 1.0], [0.0] * 5), SlowRule(1.2))
    assert slow == {
        2: "rank 2: compute took 1.400 s, 1.40 times the ranks' mean (1.000 s) over 10 steps, on node-a"
    }


def test_in_training_the_rank_whose_data_comes_late_is_named() -> None:
    slow = slow_in_training(ranks_of([1.0] * 5, [0.0, 0.0, 0.0, 0.5, 0.0]), SlowRule(1.2))
    assert list(slow) == [3]
    assert slow[3].startswith("rank 3: waited 0.500 s for its data")
    assert slow_in_training(ranks_of([1.0] * 5, [0.0, 0.0, 0.0, 0.1, 0.0]), SlowRule(1.2)) == {}


def test_ranks_that_counted_different_numbers_of_steps_are_compared_per_step() -> None:
    fewer = RankTimes(0.8, 0.0, 0.8, 8, "node-b")
    assert slow_in_training([*ranks_of([1.0, 1.0], [0.0, 0.0]), fewer], SlowRule(1.1)) == {}
    assert slow_in_training([RankTimes(), fewer], SlowRule(1.1)) == {}

"""Slow ranks stand out by InternLM's rule."""

import pytest

from headway.launch.straggler import Rule, slow_ranks, slower_than_before, usual, write_report

RULE = Rule(1.1, 0.5)


def test_up_to_four_ranks_the_mean_counts_all() -> None:
    assert usual([1.0, 1.0, 1.0, 5.0]) == 2.0


def test_above_four_ranks_the_extremes_are_left_out() -> None:
    assert usual([0.1, 1.0, 1.0, 1.0, 9.0]) == 1.0


@pytest.mark.parametrize(("slow", "flagged"), [(1.05, False), (1.2, True)])
def test_a_rank_stands_out_above_the_ratio(slow: float, flagged: bool) -> None:
    times = {"compute": [1.0, 1.0, slow, 1.0, 1.0, 1.0]}
    found = slow_ranks(times, RULE)
    assert [one.rank for one in found] == ([2] if flagged else [])
    report = write_report(times, found, RULE)
    assert ("rank 2: compute took 1.200 s, 1.20 times the ranks' mean" in report) is flagged
    assert ("no rank stands out" in report) is not flagged


def test_short_times_never_stand_out() -> None:
    assert slow_ranks({"data wait": [0.1, 0.1, 0.9, 0.1, 0.1]}, RULE) == []
    assert slow_ranks({"compute": [2.0]}, RULE) == []


def test_a_rank_is_compared_to_its_own_last_ten() -> None:
    (found,) = slower_than_before("a step", 3, [9.0, *[1.0] * 10, 2.0], RULE)
    assert (found.rank, found.usual) == (3, 1.0)
    assert slower_than_before("a step", 3, [1.0] * 11, RULE) == []
    assert slower_than_before("a step", 3, [1.0], RULE) == []

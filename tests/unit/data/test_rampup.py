"""A growing batch: rows of every batch, and of all batches before one, counted one by one."""

import pytest

from headway.data.rampup import Rampup, batch_rows, rows_before

RAMP = Rampup(start=4, add=6, every=3)
"""4, 4, 4, 10, 10, 10, 16, 16, 16, then the full batch of 20."""


def test_a_batch_grows_by_steps_up_to_the_full_one() -> None:
    sizes = [batch_rows(20, RAMP, batch) for batch in range(12)]
    assert sizes == [4, 4, 4, 10, 10, 10, 16, 16, 16, 20, 20, 20]


def test_without_a_rampup_every_batch_is_full() -> None:
    sizes = [batch_rows(20, None, batch) for batch in range(2)]
    assert sizes == [20, 20]


@pytest.mark.parametrize("rows", [3, 4, 16, 20, 23])
@pytest.mark.parametrize(
    "ramp",
    [None, RAMP, Rampup(start=4, add=1, every=1), Rampup(start=1, add=100, every=7)],
    ids=str,
)
def test_rows_before_a_batch_are_the_sum_of_those_batches(rows: int, ramp: Rampup | None) -> None:
    total = 0
    for batch in range(40):
        assert rows_before(rows, ramp, batch) == total
        total += batch_rows(rows, ramp, batch)


def test_rows_of_each_rank_are_counted_over_all_ranks() -> None:
    rampup = Rampup(start=2, add=3, every=5, per_rank=True).over(4)
    assert (rampup.start, rampup.add, rampup.every, rampup.per_rank) == (8, 12, 5, False)
    assert RAMP.over(4) is RAMP


def test_internlm_rampup_string_is_expressible() -> None:
    rampup = Rampup(start=2, add=2, every=3)
    sizes = [batch_rows(8, rampup, batch) for batch in range(11)]
    assert sizes == [2, 2, 2, 4, 4, 4, 6, 6, 6, 8, 8]

"""The `data` and `batch` sections: three forms of one batch, ramp-up in closed form, short forms of paths, on_resume rules."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config.load import validate
from headway.config.section import differences
from headway.data.config import BatchConfig, DataConfig, skipped_batches
from headway.data.rampup import Rampup, batch_rows, rows_before
from headway.errors import ConfigError


def resolve(ranks: int, seq_len: int = 512, **batch: Any) -> tuple[int, int, int, int]:
    found = validate(BatchConfig, batch).resolve(seq_len, ranks)
    assert (
        found.rows == found.micro_rows * found.accumulate * ranks
        and found.tokens == found.rows * seq_len
    )
    return found.rows, found.micro_rows, found.accumulate, found.tokens


def test_three_forms_give_the_same_batch() -> None:
    expected = (128, 8, 4, 65536)
    assert resolve(4, tokens=65536, micro_rows=8) == expected
    assert resolve(4, rows=128, micro_rows=8) == expected
    assert resolve(4, rows_per_rank=8, accumulate=4) == expected


def test_what_is_left_out_is_derived() -> None:
    assert resolve(3) == (24, 8, 1, 24 * 512)
    assert resolve(2, rows=30) == (30, 5, 3, 30 * 512)
    assert resolve(2, rows=14) == (14, 7, 1, 14 * 512)
    assert resolve(2, micro_rows=3) == (6, 3, 1, 6 * 512)


@pytest.mark.parametrize(
    ("ranks", "batch", "said"),
    [
        (1, {"tokens": 65000, "micro_rows": 8}, "65000; it must be a multiple of seq_len=512 * micro_rows=8 * ranks=1, which is 4096"),
        (1, {"tokens": 65000, "micro_rows": 8}, "Try 61440 or 65536."),
        (3, {"rows": 128, "micro_rows": 8}, "must be a multiple of micro_rows=8 * ranks=3, which is 24. Try 120 or 144."),
        (4, {"rows": 2}, "Try 4."),
        (1, {"tokens": 1, "rows": 2}, "has tokens and rows; set one of"),
        (1, {"rows": 8, "accumulate": 2}, "accumulate follows from rows"),
        (1, {"rows_per_rank": 8, "micro_rows": 4}, "Remove one"),
        (1, {"rows": 8, "rampup": {"start": 9, "add": 1, "every": 1}}, "must not exceed the full batch of 8 rows"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_says_what_would(
    ranks: int, batch: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ranks, **batch)
    assert said in str(caught.value)


@given(
    rows=st.integers(1, 20),
    start=st.integers(1, 20),
    add=st.integers(1, 9),
    every=st.integers(1, 4),
    batch=st.integers(0, 60),
)
def test_rows_before_a_batch_are_the_sum_of_the_batches(
    rows: int, start: int, add: int, every: int, batch: int
) -> None:
    rampup = Rampup(start=min(start, rows), add=add, every=every)
    assert rows_before(rows, rampup, batch) == sum(
        batch_rows(rows, rampup, i) for i in range(batch)
    )
    assert rows_before(rows, None, batch) == rows * batch


def test_internlm_rampup_string_is_expressible() -> None:
    assert [batch_rows(8, Rampup(start=2, add=2, every=3), i) for i in range(11)] == [
        2,
        2,
        2,
        4,
        4,
        4,
        6,
        6,
        6,
        8,
        8,
    ]


def test_paths_may_carry_weight_or_repeats() -> None:
    given = validate(DataConfig, {"train": ["a/b@0.3", {"path": "c@d/e", "weight": 2}]}).train
    assert given is not None and [(one.path, one.weight) for one in given] == [
        ("a/b", 0.3),
        ("c@d/e", 2.0),
    ]
    given = validate(DataConfig, {"train": "s#2"}).train
    assert given is not None and (given[0].path, given[0].repeat) == ("s", 2)


def test_skipped_batches_are_ascending_ranges() -> None:
    assert skipped_batches("3-5, 9") == ((3, 5), (9, 9)) and skipped_batches("") == ()
    for wrong in ("x", "5-3", "3,3", "-1", "3-5,4"):
        with pytest.raises(ValueError, match="ascending"):
            skipped_batches(wrong)


def test_a_resumed_run_may_change_how_data_is_read_but_not_which() -> None:
    old = validate(DataConfig, {"train": "a"})
    for key, value, fixed in (
        ("workers", 5, False),
        ("skip_batches", "3", False),
        ("seq_len", 64, True),
        ("train", "b", True),
        ("packing", "pad", True),
    ):
        changed = differences(old, validate(DataConfig, {"train": "a", key: value}))
        assert (len(changed[0]), len(changed[1])) == ((1, 0) if fixed else (0, 1)), key
    batch = differences(
        validate(BatchConfig, {"rows": 8}), validate(BatchConfig, {"rows": 8, "micro_rows": 2})
    )
    assert batch == ([], ["micro_rows: null -> 2"])


def test_windows_and_documents_per_row_follow_from_the_row() -> None:
    assert [(DataConfig(seq_len=n).window, DataConfig(seq_len=n).documents_per_row) for n in (128, 4096, 131072)] == [
        (1 << 18, 8), (1 << 18, 64), (1 << 23, 2048)
    ]  # fmt: skip

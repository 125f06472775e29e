"""The `data` and `batch` sections: three forms of one batch, short forms of paths, rules of on_resume."""

from typing import Any

import pytest

from headway.config.load import validate
from headway.config.section import differences
from headway.data.config import BatchConfig, DataConfig, skipped_batches
from headway.errors import ConfigError


def resolve(ranks: int, seq_len: int = 512, **batch: Any) -> tuple[int, int, int, int]:
    resolved = validate(BatchConfig, batch).resolve(seq_len, ranks)
    assert resolved.rows == resolved.micro_rows * resolved.accumulate * ranks
    assert resolved.tokens == resolved.rows * seq_len
    return resolved.rows, resolved.micro_rows, resolved.accumulate, resolved.tokens


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


def test_paths_may_carry_weight_or_repeats() -> None:
    sources = validate(DataConfig, {"train": ["a/b@0.3", {"path": "c@d/e", "weight": 2}]}).train
    assert sources is not None
    assert [(source.path, source.weight) for source in sources] == [
        ("a/b", 0.3),
        ("c@d/e", 2.0),
    ]
    sources = validate(DataConfig, {"train": "s#2"}).train
    assert sources is not None
    assert (sources[0].path, sources[0].repeat) == ("s", 2)


def test_skipped_batches_are_ascending_ranges() -> None:
    assert skipped_batches("3-5, 9") == ((3, 5), (9, 9))
    assert skipped_batches("") == ()
    for wrong in ("x", "5-3", "3,3", "-1", "3-5,4"):
        with pytest.raises(ValueError, match="ascending"):
            skipped_batches(wrong)


def refused_and_allowed(key: str, value: object) -> tuple[list[str], list[str]]:
    """What a change of one setting of the data is for a resumed run."""
    old = validate(DataConfig, {"train": "a"})
    return differences(old, validate(DataConfig, {"train": "a", key: value}))


@pytest.mark.parametrize(("key", "value"), [("workers", 5), ("skip_batches", "3")])
def test_a_resumed_run_may_change_how_data_is_read(key: str, value: object) -> None:
    refused, allowed = refused_and_allowed(key, value)
    assert refused == []
    assert len(allowed) == 1


@pytest.mark.parametrize(("key", "value"), [("seq_len", 64), ("train", "b"), ("packing", "pad")])
def test_a_resumed_run_may_not_change_which_data_is_read(key: str, value: object) -> None:
    refused, allowed = refused_and_allowed(key, value)
    assert len(refused) == 1
    assert allowed == []


def test_a_resumed_run_may_change_the_rows_of_a_microbatch() -> None:
    old = validate(BatchConfig, {"rows": 8})
    new = validate(BatchConfig, {"rows": 8, "micro_rows": 2})
    assert differences(old, new) == ([], ["micro_rows: null -> 2"])


def test_windows_and_documents_per_row_follow_from_the_row() -> None:
    assert [(DataConfig(seq_len=n).window, DataConfig(seq_len=n).documents_per_row) for n in (128, 4096, 131072)] == [
        (1 << 18, 8), (1 << 18, 64), (1 << 23, 2048)
    ]  # fmt: skip

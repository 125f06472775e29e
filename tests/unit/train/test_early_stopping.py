"""When a run has waited long enough for a better validation."""

import pytest

from headway.config.load import load
from headway.errors import ConfigError
from headway.train.config import Recipe, StopConfig
from headway.train.early_stopping import EarlyStopping


def used(
    values: list[float | None], *, min_delta: float = 0.0, higher: bool = False
) -> tuple[list[int], EarlyStopping]:
    patience = EarlyStopping()
    seen = []
    for step, value in enumerate(values, 1):
        patience = patience.after(value, step, min_delta, higher_is_better=higher)
        seen.append(patience.used)
    return seen, patience


def test_the_first_validation_sets_the_mark_and_only_a_better_one_moves_it() -> None:
    seen, end = used([3.0, 2.0, 2.0, 2.5, 1.9, 1.9])
    assert seen == [0, 0, 1, 2, 0, 1]
    assert (end.best, end.best_step) == (1.9, 5)


def test_a_gain_must_exceed_min_delta_over_the_mark_not_over_the_last_one() -> None:
    seen, end = used([2.0, 1.95, 1.92, 1.89], min_delta=0.1)
    assert seen == [0, 1, 2, 0]  # 1.89 is 0.11 below the mark, though every single gain is small
    assert end.best == 1.89
    assert used([1.0, 0.9], min_delta=0.1)[0] == [0, 1]


def test_more_is_better_where_the_goal_says_so() -> None:
    assert used([0.5, 0.6, 0.55], higher=True)[0] == [0, 0, 1]


def test_a_validation_without_a_finite_number_uses_up_patience() -> None:
    assert used([None, 2.0, None, None])[0] == [1, 0, 1, 2]


def test_it_is_over_when_patience_is_used_up_and_never_without_the_setting() -> None:
    assert EarlyStopping(1.0, 1, 3).is_over(StopConfig(patience=3))
    assert not EarlyStopping(1.0, 1, 3).is_over(StopConfig(patience=4))
    assert not EarlyStopping(1.0, 1, 99).is_over(None)
    assert EarlyStopping(**EarlyStopping(1.0, 2, 3).to_json()) == EarlyStopping(1.0, 2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["eval.stop.patience=2"], r"eval\.stop is given, but data\.valid is null"),
        (
            ["eval.stop.patience=2", "data.valid.fraction=0.1", "eval.every=null"],
            "eval.every is null",
        ),
        (
            ["eval.stop.patience=2", "data.valid.fraction=0.1", "checkpoint.keep_best=0"],
            r"checkpoint\.keep_best is 0",
        ),
        (["eval.stop.patience=0", "data.valid.fraction=0.1"], "greater than 0"),
    ],
)
def test_early_stopping_without_validation_or_best_checkpoints_is_refused(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(Recipe, None, [*settings, "data.train=[store]"])

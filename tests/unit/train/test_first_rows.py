"""The rows that are validated before the first step."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.runs import make_stores, tiny_settings

from headway.errors import ConfigError
from headway.parallel.base import BaseEngine
from headway.tasks import kto, next_token
from headway.tasks.base import TaskConfig
from headway.track.metrics_file import read_metrics
from headway.train import first_rows, train
from headway.train.config import Recipe
from headway.train.first_rows import FirstRows, affordable_rows

BASELINE = ("steps=4", "eval.at_start=true")


@pytest.mark.parametrize(
    ("rows", "num_ranks", "expected"),
    [
        (64, 1, None),
        (100, 1, None),
        (3, 1, FirstRows(3, 3, 1)),
        (1, 1, FirstRows(1, 1, 1)),
        (20, 1, FirstRows(16, 8, 2)),
        (1, 4, FirstRows(4, 1, 1)),
        (20, 4, FirstRows(20, 5, 1)),
    ],
)
def test_first_rows_are_whole_microbatches_of_every_rank(
    rows: int, num_ranks: int, expected: FirstRows | None
) -> None:
    assert FirstRows.of(rows, 64, 8, num_ranks) == expected


def test_rows_are_chosen_by_flops_alone() -> None:
    # 0.5 billion weights, two FLOPs each, 512 tokens: three rows are 1.5e12 FLOPs.
    assert affordable_rows(512 * 0.97e9, 1) == 3
    assert affordable_rows(512 * 0.97e9, 2) == 1
    assert affordable_rows(1e15, 1) == 1


def test_before_and_after_have_numbers_of_the_same_rows(tmp_path: Path) -> None:
    make_stores(tmp_path)
    few = Recipe.load(
        None,
        [*tiny_settings(tmp_path, "few"), *BASELINE, "eval.start_rows=2", "optim.lr=0"],
    )
    summary = train(few)
    records = list(read_metrics(tmp_path / "few" / "metrics.jsonl"))
    before = records[0]["valid_first_rows_at_start"]["valid"]
    assert "valid_at_start" not in records[0]
    assert before["rows"] == 2
    # The weights never change, so equal rows have equal numbers, and other rows do not.
    for record in (records[1], records[3]):
        assert record["valid_first_rows"]["valid"] == before
        assert record["valid"]["valid"]["loss"] != before["loss"]
        assert record["valid"]["valid"]["tokens"] > before["tokens"]

    spans = summary["validation"]
    assert spans["valid"]["loss"]["before"] is None
    first = spans["valid (first 2 rows)"]["loss"]
    assert first["before"] == first["last"] == before["loss"]
    assert first["improved"] is False

    # All rows together are those of a validation in one piece.
    whole = Recipe.load(None, [*tiny_settings(tmp_path, "whole"), *BASELINE, "optim.lr=0"])
    train(whole)
    plain = list(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    numbers = plain[0]["valid_at_start"]["valid"]
    assert numbers["tokens"] == records[1]["valid"]["valid"]["tokens"]
    assert numbers["loss"] == pytest.approx(records[1]["valid"]["valid"]["loss"], rel=1e-6)


def test_a_set_without_more_rows_is_validated_as_a_whole(tmp_path: Path) -> None:
    make_stores(tmp_path, documents=10)
    settings = [
        *tiny_settings(tmp_path, "run"),
        *BASELINE,
        "eval.rows=1000",
        "eval.start_rows=900",
    ]
    train(Recipe.load(None, settings))
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert "valid_at_start" in records[0]
    assert not any("valid_first_rows" in record for record in records)


def test_auto_reads_fewer_rows_of_a_large_model_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_stores(tmp_path)
    # To a budget this small, the tiny model is large.
    monkeypatch.setattr(first_rows, "CPU_START_FLOPS", 1.0)
    recipe = Recipe.load(None, [*tiny_settings(tmp_path, "run"), *BASELINE])
    with caplog.at_level("INFO", logger="headway"):
        train(recipe)
    assert (
        "validation before the first step reads 1 of at most 8 rows of a set "
        "(eval.start_rows=auto); later validations repeat their numbers as valid_first_rows"
    ) in caplog.messages
    assert any(
        line.startswith("validation loss of valid (first 1 rows): ") and " before, " in line
        for line in caplog.messages
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation"]["valid (first 1 rows)"]["loss"]["before"] is not None


def test_auto_reads_all_rows_of_a_small_model(tmp_path: Path) -> None:
    make_stores(tmp_path)
    train(Recipe.load(None, [*tiny_settings(tmp_path, "run"), *BASELINE]))
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert "valid_at_start" in records[0]
    assert not any("valid_first_rows" in record for record in records)


def test_the_best_checkpoint_is_chosen_by_all_rows(tmp_path: Path) -> None:
    make_stores(tmp_path)
    settings = [
        *tiny_settings(tmp_path, "run"),
        *BASELINE,
        "eval.start_rows=1",
        "eval.stop.patience=100",
    ]
    summary = train(Recipe.load(None, settings))
    validation = summary["validation"]["valid"]["loss"]
    assert summary["final_step"] == validation["best_step"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["eval.start_rows=4"], "eval.start_rows is 4, but eval.at_start is false"),
        (["eval.at_start=true", "eval.start_rows=0"], "it must be auto, or at least 1"),
    ],
)
def test_a_bound_without_use_is_refused(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Recipe.load(None, [*tiny_settings(tmp_path, "run"), "steps=2", *settings])


def test_rows_that_are_compared_with_each_other_are_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_stores(tmp_path)
    monkeypatch.setattr(first_rows, "CPU_START_FLOPS", 1.0)
    monkeypatch.setattr(BaseEngine, "is_validated_as_a_whole", True)
    train(Recipe.load(None, [*tiny_settings(tmp_path, "run"), *BASELINE]))
    records = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert "valid_at_start" in records[0]
    assert not any("valid_first_rows" in record for record in records)

    bounded = [*tiny_settings(tmp_path, "refused"), *BASELINE, "eval.start_rows=2"]
    with pytest.raises(ConfigError, match=r"eval\.start_rows is 2; .* lower eval\.rows"):
        train(Recipe.load(None, bounded))
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("config", "is_whole"), [(next_token.Config(), False), (kto.Config(), True)]
)
def test_an_engine_knows_whether_its_objective_compares_rows(
    config: TaskConfig, is_whole: bool
) -> None:
    engine = SimpleNamespace(runner=SimpleNamespace(objective=config.build()))
    known = BaseEngine.is_validated_as_a_whole.fget
    assert known is not None
    assert known(engine) is is_whole

"""The lines at the end of a run: what validation said before, at best and at last; texts that fit the screen."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.runtime.status_line import columns
from headway.train.closing import fold, plain, speed_lines, validation_lines
from headway.train.history import total_metrics
from headway.train.meter import AT_START


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(
            json.dumps({"loss": 1.0, "time": {}, **record, "step": step}) + "\n"
            for step, record in enumerate(records, 1)
        )
    )
    return path


def test_a_summary_has_validation_before_at_best_and_at_last(tmp_path: Path) -> None:
    def valid(loss: float, accuracy: float) -> dict[str, Any]:
        return {"valid": {"loss": loss, "rewards/accuracies": accuracy, "tokens": 3}}

    memory = [{"memory_bytes": bytes_used} for bytes_used in (5, 9, 7)]
    records = [
        {AT_START: valid(0.7, 0.5), "time": memory[0]},
        {"valid": valid(0.4, 0.6), "time": memory[1]},
        {"valid": valid(0.6, 0.8), "time": memory[2]},
    ]
    totals = total_metrics(write(tmp_path / "metrics.jsonl", records))
    assert totals.peak_memory_bytes == 9
    assert totals.validation() == {
        "valid": {
            "loss": {"before": 0.7, "best": 0.4, "best_step": 2, "last": 0.6, "improved": True},
            "rewards/accuracies": {
                "before": 0.5,
                "best": 0.8,
                "best_step": 3,
                "last": 0.8,
                "improved": True,
            },
        }
    }
    assert list(validation_lines(totals.validation())) == [
        "validation loss: 0.7000 before, 0.4000 best (step 2), 0.6000 last",
        "validation accuracy: 0.5000 before, 0.8000 best (step 3), 0.8000 last",
    ]


def test_a_run_that_did_not_help_says_so_and_one_without_a_baseline_does_not_claim(
    tmp_path: Path,
) -> None:
    worse = [
        {
            AT_START: {"a": {"loss": 0.5}, "b": {"loss": 2.0}},
            "valid": {"a": {"loss": 0.5}, "b": {"loss": 1.0}},
        }
    ]
    assert list(
        validation_lines(total_metrics(write(tmp_path / "worse.jsonl", worse)).validation())
    ) == [
        "validation loss of a: 0.5000 before, 0.5000 best (step 1), 0.5000 last; never better than before",
        "validation loss of b: 2.0000 before, 1.0000 best (step 1), 1.0000 last",
    ]
    alone = total_metrics(
        write(tmp_path / "alone.jsonl", [{"valid": {"valid": {"loss": 0.5}}}])
    ).validation()
    assert list(validation_lines(alone)) == ["validation loss: 0.5000 best (step 1), 0.5000 last"]
    assert alone["valid"]["loss"]["improved"] is None
    assert total_metrics(write(tmp_path / "none.jsonl", [{}])).validation() == {}


def test_a_validation_that_is_no_number_is_said(tmp_path: Path) -> None:
    broken = [
        {AT_START: {"valid": {"loss": 1.5}}, "valid": {"valid": {"loss": 1.2}}},
        {"valid": {"valid": {"loss": None}}},
    ]
    never = [{AT_START: {"valid": {"loss": 1.5}}, "valid": {"valid": {"loss": None}}}]
    for records, line, best, improved in (
        (broken, "1.5000 before, 1.2000 best (step 1), not a number last", 1.2, True),
        (never, "1.5000 before, not a number last; never better than before", None, False),
    ):
        validation = total_metrics(write(tmp_path / "metrics.jsonl", records)).validation()
        assert list(validation_lines(validation)) == [f"validation loss: {line}"]
        span = validation["valid"]["loss"]
        assert span["last"] is None
        assert span["best"] == best
        assert span["improved"] is improved


def test_speed_and_memory_are_said_where_they_are_known() -> None:
    known = {"tokens_per_second": 1234.0, "peak_memory_bytes": 1_230_000_000}
    assert list(speed_lines(known)) == ["1.2k tokens/s, 1.2 GB of memory at most"]
    assert list(speed_lines({"tokens_per_second": None, "peak_memory_bytes": 0})) == []


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_long_text_is_folded_to_three_lines_of_the_screen(width: int) -> None:
    lines = fold(plain("word " * 60), "  before: ", width)
    assert len(lines) <= 3
    assert all(columns(line) < width for line in lines)
    assert lines[0].startswith("  before: word")
    assert all(line.startswith(" " * 10) for line in lines[1:])


def test_a_folded_text_says_that_it_goes_on() -> None:
    assert fold(plain("word " * 60), "  before: ", 80)[-1].endswith("word ...")


def test_wide_characters_count_two_columns() -> None:
    lines = fold("你" * 100, "  after:  ", 80)
    assert len(lines) == 3
    assert all(columns(line) < 80 for line in lines)


def test_an_empty_text_has_one_line() -> None:
    assert fold("", "  after:  ", 80) == ["  after:  "]


def test_a_text_does_nothing_to_the_screen() -> None:
    assert plain("a\x1b[31m\r\nb\u202e c\t") == "a [31m b c"

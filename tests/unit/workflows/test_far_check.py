"""Gates that train on text without far gain are warned about, with the figure; text of far copies is not."""

import logging
from pathlib import Path

import pytest
from support.copying_model import write_copying_model, write_documents

from headway.config.load import load
from headway.eval.far_gain import DocumentGain
from headway.eval.far_options import FarReach
from headway.train.config import Recipe
from headway.workflows.doctor_data import SampleOptions, check_data
from headway.workflows.far_check import SourceGain, judge, warn_without_far_gain


def recipe(tmp_path: Path, *more: str) -> Recipe:
    return load(
        Recipe,
        None,
        [
            f"data.train={tmp_path}/docs.jsonl",
            f"data.cache_dir={tmp_path}/cache",
            f"run={{dir: {tmp_path}, name: gates}}",
            "data.seq_len=96",
            "objective={kind: head_sparsity, window: 16, sinks: 4}",
            "freeze=[weights]",
            "device=cpu",
            *more,
        ],
    )


def doctor_line(recipe: Recipe):
    (checkup,) = check_data(recipe, SampleOptions(0))
    (line,) = [check for check in checkup.checks if check.name == "far context"]
    return line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_copying_model(tmp_path / "model")


def test_doctor_data_warns_about_text_without_far_gain(tmp_path: Path, model: Path) -> None:
    write_documents(tmp_path / "docs.jsonl", copies=0)
    line = doctor_line(recipe(tmp_path, f"init.from={model}"))
    assert line.state == "warn"
    assert "gates learn little" in line.detail
    assert "4 documents" in line.detail
    assert line.remedy is not None
    assert "headway data long-range" in line.remedy


def test_doctor_data_accepts_far_copies(tmp_path: Path, model: Path) -> None:
    write_documents(tmp_path / "docs.jsonl", shuffled=0)
    line = doctor_line(recipe(tmp_path, f"init.from={model}"))
    assert line.state == "ok"
    gain = float(line.detail.split()[1])
    assert gain > 1


def test_rows_that_end_inside_the_window_are_warned_about(tmp_path: Path, model: Path) -> None:
    write_documents(tmp_path / "docs.jsonl")
    line = doctor_line(recipe(tmp_path, f"init.from={model}", "objective.window=95"))
    assert line.state == "warn"
    assert "rows of data.seq_len=96 tokens end inside window 95 + sinks 4" in line.detail


def test_sparsify_warns_once_before_a_new_run(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_documents(tmp_path / "docs.jsonl", copies=0)
    gates = recipe(tmp_path, f"init.from={model}")
    with caplog.at_level(logging.WARNING):
        warn_without_far_gain(gates)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("far context: gain")
    # A run that continues is not measured again.
    caplog.clear()
    (tmp_path / "gates").mkdir()
    warn_without_far_gain(gates)
    assert not caplog.records


def test_a_recipe_without_gates_or_without_a_model_is_not_measured(
    tmp_path: Path, model: Path
) -> None:
    write_documents(tmp_path / "docs.jsonl", copies=0)
    for changes in (
        [f"init.from={model}", "objective={kind: next_token}", "freeze=[]"],
        [f"tokenizer={model.parent}/tokenizer", "freeze=[]", "model.max_seq_len=96"],
    ):
        (checkup,) = check_data(recipe(tmp_path, *changes), SampleOptions(0))
        assert not [check for check in checkup.checks if check.name == "far context"]


def test_the_gain_of_a_mixture_counts_sources_by_their_share() -> None:
    def source(name: str, share: float, gain: float) -> SourceGain:
        return SourceGain(name, share, [DocumentGain(0, 90, 70, 1.0, 1.0 + gain)])

    reach = FarReach(16, 4, 96)
    mixed = judge([source("text", 0.9, 0.0), source("tables", 0.1, 1.0)], reach)
    assert mixed.state == "ok"
    assert "gain 0.100" in mixed.detail
    assert "text 0.000, tables 1.000" in mixed.detail
    assert judge([source("text", 0.99, 0.0), source("tables", 0.01, 1.0)], reach).state == "warn"

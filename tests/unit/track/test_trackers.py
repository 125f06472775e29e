"""Every tracker takes the same records; the console fits 100 columns; TensorBoard's curves are not doubled by a resume."""

import logging
from pathlib import Path
from typing import Any

import pytest

from headway.config.kinds import kind_config, kind_names
from headway.track.base import flatten
from headway.track.console import Console, step_line
from headway.track.service import ServiceConfig

RECORD: dict[str, Any] = {
    "step": 120, "loss": 3.41234, "lr": 3e-4, "grad_norm": 0.912, "inf_nan_skip_batches": 0, "valid": {"loss": 3.2, "code/loss": None},
    "time": {
        "tokens_per_second": 12345.6, "mfu_full": 0.412, "mfu_causal": 0.38, "memory_bytes": 12.1e9, "eta_seconds": 185.0,
        "gpu_power_watts": None, "data_wait_seconds": 0.001,
    },
}  # fmt: skip


def test_records_flatten_by_name() -> None:
    flat = flatten(RECORD)
    assert (
        flat["tokens_per_second"] == 12345.6
        and flat["valid/loss"] == 3.2
        and flat["valid/code/loss"] is None
        and "step" not in flat
    )


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in kind_names("headway.track")
        if not issubclass(kind_config("headway.track", kind), ServiceConfig)
    ],
)
def test_every_kind_takes_records_notes_and_the_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ALERT_WEBHOOK", "MONITOR_ADDRESS"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/nobody-listens")
    tracker = (
        kind_config("headway.track", kind).model_validate({"kind": kind}).build(tmp_path, "run")
    )  # pyright: ignore
    tracker.note("before the first step")
    tracker.log(120, RECORD)
    tracker.log(121, {"step": 121, "loss": float("nan")})
    tracker.note("after")
    tracker.event("save_failure", "the disk is full", 121)
    tracker.close()
    tracker.close()


def test_a_step_is_one_readable_line() -> None:
    line = step_line(120, 1000, flatten(RECORD))
    assert (
        line
        == "120/1000  loss 3.412  lr 3.0e-4  grad 0.91  12.3k tok/s  mfu full 41% causal 38%  12 GB  eta 3m 05s"
    )


def test_large_numbers_fit_100_columns_and_unknown_ones_are_left_out() -> None:
    big = {
        "loss": 12.34567, "lr": 3.123e-5, "grad_norm": 123456.7, "tokens_per_second": 123.456e6, "mfu_full": 0.4123, "mfu_causal": 0.3812,
        "memory_bytes": 139.8e9, "eta_seconds": 187200.0,
    }  # fmt: skip
    assert len(step_line(100000, 100000, flatten(big))) <= 100
    assert (
        step_line(1, None, {"loss": float("nan"), "mfu_full": None, "mfu_causal": None})
        == "step 1  loss nan"
    )
    assert (
        step_line(1, None, {"loss": None, "lr": 0.0, "grad_norm": None})
        == "step 1  loss None  lr 0.0e0  grad None"
    )


def test_verbose_shows_every_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headway"):
        Console(1000).log(120, RECORD)
    line, valid, rest = caplog.messages
    assert line.startswith("120/1000") and valid == "valid/loss 3.2  valid/code/loss None"
    assert (
        "inf_nan_skip_batches 0" in rest and "gpu_power_watts" not in rest and "loss 3" not in rest
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, "headway"):
        Console(1000).note("hello")
    assert caplog.messages == ["hello"]


def test_a_validation_before_the_first_step_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        Console(3).log(0, {"step": 0, "valid": {"valid": {"loss": 6.325}}})
    assert caplog.messages == ["validated at the start: valid/loss 6.325"]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config: Any = kind_config("headway.track", "tensorboard").model_validate(
        {"kind": "tensorboard"}
    )
    for steps, value in ((range(1, 6), 1.0), (range(4, 8), 2.0)):  # killed after 5, resumed from 3
        tracker = config.build(tmp_path, "run")
        for step in steps:
            tracker.log(step, {"step": step, "loss": value, "time": {"tgs": 5, "mfu_full": None}})
        tracker.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in shown.Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
        (7, 2.0),
    ]
    assert set(shown.Tags()["scalars"]) == {"loss", "tgs"}

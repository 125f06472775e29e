"""What the console says of a step, and which events are warnings."""

import logging
from typing import get_args

import pytest

from headway.track.base import Event
from headway.track.console import Console, step_line


def test_a_step_line_says_when_training_waits_for_data() -> None:
    assert "WAITS FOR DATA 20%" in step_line(3, 10, {"loss": 1.0, "data_wait_share": 0.2})
    assert "DATA" not in step_line(3, 10, {"loss": 1.0, "data_wait_share": 0.04})


def test_a_step_line_shows_sparsity_and_its_target() -> None:
    line = step_line(3, 10, {"loss": 1.0, "sparsity": 0.3124, "sparsity_target": 0.35})
    assert line == "3/10  loss 1  sparsity 0.312/0.350"
    assert "sparsity" not in step_line(3, 10, {"loss": 1.0})


def test_a_line_with_every_number_still_fits_100_columns() -> None:
    line = step_line(100000, 100000, {
        "loss": 12.34567, "lr": 3.123e-5, "grad_norm": 123456.7, "tokens_per_second": 123.456e6, "mfu_full": 0.4123, "mfu_causal": 0.3812,
        "memory_bytes": 139.8e9, "eta_seconds": 187200.0, "sparsity": 0.3, "sparsity_target": 0.7, "data_wait_share": 0.2,
    })  # fmt: skip
    assert (
        len(line) <= 100
        and "sparsity 0.300/0.700" in line
        and "WAITS FOR DATA 20%" in line
        and "eta" in line
    )


def test_only_trouble_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "headway"):
        for name in get_args(Event):
            Console().event(name, "what happened", 7)
    warned = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    assert warned == {
        f"{name.replace('_', ' ')} at step 7: what happened"
        for name in get_args(Event)
        if name not in ("start", "finish")
    }
    assert len(caplog.records) == len(get_args(Event))

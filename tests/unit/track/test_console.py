"""What the console says of a step, and which events are warnings."""

import logging
from typing import get_args

import pytest
from support.step_records import STEP_RECORD

from headway.track.base import Event, flatten
from headway.track.console import Console, rollout_lines, step_line


def test_a_step_line_says_when_training_waits_for_data() -> None:
    assert "WAITS FOR DATA 20%" in step_line(3, 10, {"loss": 1.0, "data_wait_share": 0.2})
    assert "DATA" not in step_line(3, 10, {"loss": 1.0, "data_wait_share": 0.04})


def test_a_step_with_rollouts_begins_with_its_reward_and_has_two_more_lines() -> None:
    metrics = {
        "reward": 0.4125,
        "loss": 1e-8,
        "rollout/prompts": 8.0,
        "entropy": 0.381,
        "kl": 0.01,
        "agreement/mean": 2.1e-7,
        "answer/tokens": 187.0,
        "answer/cut": 0.04,
        "rollout/no_signal": 0.25,
        "clipped/low": 0.01,
        "clipped/high": 0.12,
        "rollout_share": 0.61,
        "rollout/tokens_per_second": 12_340.0,
        "update_tokens_per_second": 45_600.0,
        "rollout/staleness": 1.0,
    }
    assert step_line(3, 10, metrics) == "3/10  reward 0.4125  loss 1e-08"
    assert list(rollout_lines(metrics)) == [
        "  entropy 0.38  kl 0.01  agreement 2.1e-07  tokens 187  cut 4%  no signal 25%",
        "  rollouts 61%  sampling 12.3k tok/s  updates 45.6k tok/s  clip low 1%  clip high 12%  staleness 1",
    ]
    assert max(len(line) for line in rollout_lines(metrics)) <= 100
    assert list(rollout_lines({"loss": 1.0})) == []


def test_the_line_of_v_repeats_no_number_of_the_lines_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = {
        "reward": 0.5,
        "rollout/prompts": 8.0,
        "clipped/low": 0.01,
        "update_tokens_per_second": 45_600.0,
        "micro_num": 4,
    }
    with caplog.at_level(logging.DEBUG, "headway"):
        Console().log(3, metrics)
    assert caplog.messages[-1] == "  rollout/prompts 8  micro_num 4"


def test_a_step_line_shows_sparsity_and_its_target() -> None:
    line = step_line(3, 10, {"loss": 1.0, "sparsity": 0.3124, "sparsity_target": 0.35})
    assert line == "3/10  loss 1  sparsity 0.312/0.350"
    assert "sparsity" not in step_line(3, 10, {"loss": 1.0})


def test_a_line_with_every_number_still_fits_100_columns() -> None:
    line = step_line(100000, 100000, {
        "loss": 12.34567, "lr": 3.123e-5, "grad_norm": 123456.7, "tokens_per_second": 123.456e6, "mfu_full": 0.4123, "mfu_causal": 0.3812,
        "memory_bytes": 139.8e9, "eta_seconds": 187200.0, "sparsity": 0.3, "sparsity_target": 0.7, "data_wait_share": 0.2,
    })  # fmt: skip
    assert len(line) <= 100
    assert "sparsity 0.300/0.700" in line
    assert "WAITS FOR DATA 20%" in line
    assert "eta" in line


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


def test_a_step_is_one_readable_line() -> None:
    line = step_line(120, 1000, flatten(STEP_RECORD))
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
        Console(1000).log(120, STEP_RECORD)
    line, valid, rest = caplog.messages
    assert line.startswith("120/1000")
    assert valid == "valid/loss 3.2  valid/code/loss None"
    assert "inf_nan_skip_batches 0" in rest
    assert "gpu_power_watts" not in rest
    assert "loss 3" not in rest
    caplog.clear()
    with caplog.at_level(logging.INFO, "headway"):
        Console(1000).note("hello")
    assert caplog.messages == ["hello"]


def test_a_validation_before_the_first_step_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        Console(3).log(0, {"step": 0, "valid": {"valid": {"loss": 6.325}}})
    assert caplog.messages == ["validated at the start: valid/loss 6.325"]

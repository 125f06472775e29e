"""Training says so when it waits for data."""

from headway.track.console import step_line


def test_a_step_line_says_when_training_waits_for_data() -> None:
    assert "WAITS FOR DATA 20%" in step_line(3, 10, {"loss": 1.0, "data_wait_share": 0.2})
    assert "DATA" not in step_line(3, 10, {"loss": 1.0, "data_wait_share": 0.04})

"""Every tracker takes the same records."""

from pathlib import Path

import pytest
from support.step_records import STEP_RECORD

from headway.config.kinds import kind_config, kind_names
from headway.track.base import flatten
from headway.track.service import ServiceConfig


def test_records_flatten_by_name() -> None:
    flat = flatten(STEP_RECORD)
    assert flat["tokens_per_second"] == 12345.6
    assert flat["valid/loss"] == 3.2
    assert flat["valid/code/loss"] is None
    assert "step" not in flat


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
    tracker.log(120, STEP_RECORD)
    tracker.log(121, {"step": 121, "loss": float("nan")})
    tracker.note("after")
    tracker.event("save_failure", "the disk is full", 121)
    tracker.close()
    tracker.close()

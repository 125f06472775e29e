"""A beginning and an end are no warnings; everything else that happens to a run is one."""

import logging
from typing import get_args

import pytest

from headway.track.base import Event
from headway.track.console import Console


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

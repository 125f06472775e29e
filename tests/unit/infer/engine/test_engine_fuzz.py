"""Every feature of a request, in any schedule and little memory, against the plain loop of `support.engine_fuzz`."""

import logging
import os
import time
from pathlib import Path

import pytest
from support.engine_fuzz import (
    CONVOLUTION,
    HYBRID,
    STATE_SPACE,
    FuzzModels,
    FuzzReport,
    RequestPool,
    fuzz,
    run_schedule,
)

from headway.model.config import ModelConfig

FEATURES = 14
DRILL_SECONDS = float(os.environ.get("HEADWAY_FUZZ_SECONDS", "180"))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Requests fail on purpose, and each says so."""
    caplog.set_level(logging.ERROR, "headway")


def test_every_feature_in_any_schedule_gives_the_plain_loops_answers(tmp_path: Path) -> None:
    report = fuzz(FuzzModels(tmp_path), range(12), 24, 12)
    assert report.differences == []
    assert report.preempted_reading > 5
    assert report.cached_tokens > 0
    assert report.accepted_tokens > 0
    assert len(report.features) == FEATURES
    assert min(report.features.values()) > 0


@pytest.mark.parametrize(
    "config",
    [HYBRID, CONVOLUTION, STATE_SPACE],
    ids=["linear attention", "convolution", "state space"],
)
def test_a_model_with_states_gives_the_plain_loops_answers_in_any_schedule(
    tmp_path: Path, config: ModelConfig
) -> None:
    report = fuzz(FuzzModels(tmp_path, config), range(140, 145), 16, 8)
    assert report.differences == []
    assert report.preempted > 5
    assert report.cached_tokens > 0


@pytest.mark.drill
def test_many_random_schedules_cover_every_feature_without_a_difference(tmp_path: Path) -> None:
    """As many as fit into HEADWAY_FUZZ_SECONDS; `pytest -s -m drill` shows what they covered."""
    models = FuzzModels(tmp_path)
    report = FuzzReport()
    first = int(os.environ.get("HEADWAY_FUZZ_SEED", "1000"))
    began = time.monotonic()
    seed = first
    while time.monotonic() - began < DRILL_SECONDS:
        pool = RequestPool(models, seed, 30)
        for _ in range(25):
            run_schedule(seed, models, pool, report)
            seed += 1
    print(f"\nseeds {first} to {seed - 1}", *report.lines(), sep="\n")  # noqa: T201
    assert report.differences == []
    assert len(report.features) == FEATURES

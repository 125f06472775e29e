"""Every feature of a request, in any schedule and little memory, against the plain loop of `support.engine_fuzz`."""

import logging
import os
import time
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

import pytest
from support.engine_fuzz import (
    CONTEXT,
    CONVOLUTION,
    HYBRID,
    MIXTURE,
    STATE_SPACE,
    FuzzModels,
    FuzzReport,
    PictureModels,
    RequestPool,
    fuzz,
    run_schedule,
)

from headway.errors import ConfigError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions
from headway.kernels.exact_attention import KEYS
from headway.model.config import ModelConfig

FEATURES = 16
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
    report = fuzz(FuzzModels(tmp_path, config), range(150, 155), 16, 8)
    assert report.differences == []
    assert report.preempted > 5
    assert report.cached_tokens > 0


@pytest.mark.slow
def test_experts_and_their_routes_are_the_plain_loops_in_any_schedule(tmp_path: Path) -> None:
    report = fuzz(FuzzModels(tmp_path, MIXTURE), range(240, 245), 16, 8)
    assert report.differences == []
    assert report.preempted > 5
    assert report.features["routes"] > 5


@pytest.mark.slow
def test_pictures_of_a_tower_turn_as_in_the_plain_loop_in_any_schedule(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from support.small_vision import build_vision, write_vision

    stored = write_vision(tmp_path / "vision", build_vision({"max_position_embeddings": CONTEXT}))
    report = fuzz(PictureModels(tmp_path, stored), range(340, 348), 16, 8)
    assert report.differences == []
    assert report.preempted > 5
    assert report.cached_tokens > 0
    assert report.features["pictures of a tower"] > 5


def test_an_exact_engine_with_adapters_is_refused(tmp_path: Path) -> None:
    models = FuzzModels(tmp_path)
    options = EngineOptions(exact=True, page_tokens=KEYS)
    with pytest.raises(ConfigError, match="the engine has adapters") as refusal:
        InferenceEngine(models.load(), options, models.adapters)
    assert "\n" not in str(refusal.value)


@pytest.mark.drill
@pytest.mark.timeout(DRILL_SECONDS + 300)
def test_many_random_schedules_cover_every_feature_without_a_difference(tmp_path: Path) -> None:
    """As many as fit into HEADWAY_FUZZ_SECONDS; `pytest -s -m drill` shows what they covered."""
    all_models = [FuzzModels(tmp_path / "media")]
    all_models += [FuzzModels(tmp_path / "experts", MIXTURE)]
    if find_spec("transformers") is not None:
        from support.small_vision import build_vision, write_vision

        vision = build_vision({"max_position_embeddings": CONTEXT})
        all_models.append(
            PictureModels(tmp_path / "own", write_vision(tmp_path / "vision", vision))
        )
    report = FuzzReport()
    first = int(os.environ.get("HEADWAY_FUZZ_SEED", "1000"))
    began = time.monotonic()
    seed = first
    for models in cycle(all_models):
        pool = RequestPool(models, seed, 30)
        for _ in range(12):
            run_schedule(seed, models, pool, report)
            seed += 1
        if time.monotonic() - began > DRILL_SECONDS:
            break
    print(f"\nseeds {first} to {seed - 1}", *report.lines(), sep="\n")  # noqa: T201
    assert report.differences == []
    assert len(report.features) >= FEATURES

"""The shipped recipe of alignment without one of its encoders."""

import logging
from typing import Any

import pytest

from headway.config.load import load
from headway.config.shipped import find_recipe
from headway.errors import ConfigError
from headway.tasks.contrastive import Config
from headway.train.alignment import resolve_aligner
from headway.train.config import Recipe

WITHOUT_AUDIO = "model.aligner.encoders.audio=null"


def resolved(*overrides: str) -> Recipe:
    return resolve_aligner(load(Recipe, find_recipe("multimodal/align"), overrides))


def test_a_null_encoder_leaves_its_modality_and_its_pairs_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        recipe = resolved(WITHOUT_AUDIO)
    aligner: Any = recipe.model.aligner
    objective: Any = recipe.objective
    assert aligner.modalities == ("text", "image")
    assert objective.pairs == ("text-image",)
    assert "text-audio left out" in caplog.text
    caplog.clear()
    objective = resolved().objective
    assert objective.pairs == ("text-image", "text-audio")
    assert "left out" not in caplog.text


def test_scales_of_a_modality_that_is_left_out_are_left_out() -> None:
    objective: Any = resolved(
        WITHOUT_AUDIO, "objective.log_scale={text: 1.0, image: 2.0, audio: 3.0}"
    ).objective
    assert objective.log_scale == {"text": 1.0, "image": 2.0}


def test_what_leaves_nothing_to_align_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"objective\.pairs has 'text-audio'; the aligner has text, image"
    ):
        resolved(WITHOUT_AUDIO, "objective.pairs=[text-audio]")
    with pytest.raises(ConfigError, match="needs two modalities or more"):
        resolved(WITHOUT_AUDIO, "model.aligner.encoders.image=null")
    with pytest.raises(ConfigError, match="log_scale has text; the aligner has text, image"):
        resolved(WITHOUT_AUDIO, "objective.log_scale={text: 1.0}")


def test_null_pairs_stay_all_pairs() -> None:
    settings, left_out = Config().without_absent(("text", "image"))
    assert settings.pairs is None
    assert left_out == ()

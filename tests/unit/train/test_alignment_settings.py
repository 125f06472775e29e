"""The shipped recipe of alignment: without one of its encoders, with another task, with another model."""

import logging
from typing import Any

import pytest

from headway.config.load import load
from headway.config.shipped import find_recipe
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.tasks.base import TaskConfig, TaskNeeds
from headway.tasks.contrastive import Config
from headway.tasks.next_token import Config as NextToken
from headway.train.alignment import resolve_aligner
from headway.train.config import Recipe
from headway.train.resolve import resolve

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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "objective.pairs=[text-audio]",
            r"objective\.pairs has 'text-audio'; the aligner has text, image",
        ),
        ("model.aligner.encoders.image=null", "needs two modalities or more"),
        (
            "objective.log_scale={text: 1.0}",
            "log_scale has text; the aligner has text, image",
        ),
    ],
)
def test_what_leaves_nothing_to_align_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(WITHOUT_AUDIO, setting)


def test_null_pairs_stay_all_pairs() -> None:
    settings, left_out = Config().without_absent(("text", "image"))
    assert settings.pairs is None
    assert left_out == ()


class Vectors(TaskConfig):
    """A task of somebody else that trains an aligner."""

    kind: str = "my_lab.vectors"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("captions",)

    @property
    def needs(self) -> TaskNeeds:
        return TaskNeeds(head="vectors")


def test_any_task_whose_model_puts_out_vectors_trains_an_aligner() -> None:
    recipe = load(Recipe, find_recipe("multimodal/align"), ())
    task = Vectors()
    found = resolve_aligner(recipe.model_copy(update={"objective": task}))
    assert found.objective == task
    assert {source.kind for source in found.data.train or ()} == {"captions"}
    aligner = found.model.aligner_settings
    assert task.scales_of(aligner.modalities, {}) == dict.fromkeys(aligner.modalities, 0.0)


def test_head_of_model_and_head_of_task_must_agree() -> None:
    recipe = load(Recipe, find_recipe("multimodal/align"), ())
    with pytest.raises(
        ConfigError, match=r"model\.aligner is given with objective\.kind next_token"
    ):
        resolve(recipe.model_copy(update={"objective": NextToken()}))
    with pytest.raises(
        ConfigError,
        match=r"objective\.kind is contrastive, but the recipe has no model\.aligner\. Give its encoders",
    ):
        resolve(recipe.model_copy(update={"model": ModelConfig()}))


def test_a_model_says_what_it_puts_out() -> None:
    aligner = load(Recipe, find_recipe("multimodal/align"), ()).model
    assert aligner.head == "vectors"
    assert aligner.title == "aligner"
    assert ModelConfig(score_head=True).head == "scores"
    assert ModelConfig().head == "tokens"

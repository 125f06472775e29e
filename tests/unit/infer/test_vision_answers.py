"""Answers of a model with its own vision tower: the engine writes what transformers writes, however prompts are cut, packed and shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_vision import IDS, TEXT, build_vision, processor_of, write_pictures, write_vision

from headway.errors import ConfigError, DataError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.generate import GenerateOptions
from headway.infer.load import LoadedModel, load_model
from headway.infer.media import MediaPrompt, answer_media, media_prompts, question_about
from headway.media.items import MediaRef
from headway.tokenizer.chat import find_template

pytest.importorskip("transformers", minversion="5.0")
ASKED = (("<image>What is it?", (1,)), ("Is <image> as large as <image>?", (3, 0)), ("Hello", ()), ("<image>What is it?", (2,)))  # fmt: skip
NEW = 12
TIGHT_TOKENS = 160
"""Room for the longest prompt and its answer, and not for all of them."""
PADDING = list(range(max(IDS.values()) + 1, TEXT["vocab_size"]))
"""Ids without a token, which headway never writes."""


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel, list[Path]]:
    folder = tmp_path_factory.mktemp("answers")
    # Random weights of this size never end a text, and do not write one token again and again.
    model = build_vision(std=0.3, kind=request.param)
    write_vision(folder / "model", model, kind=request.param)
    return model, load_model(folder / "model"), write_pictures(folder / "pictures")


def prompts_of(loaded: LoadedModel, paths: list[Path]) -> list[MediaPrompt]:
    questions = [
        question_about(text, [MediaRef("image", paths[number]) for number in numbers])
        for text, numbers in ASKED
    ]
    return media_prompts(loaded, questions, find_template("chatml", loaded.require_tokenizer()))


@pytest.fixture(scope="module")
def wanted(case: tuple[Any, LoadedModel, list[Path]]) -> list[list[int]]:
    """The greedy continuation of every prompt by transformers, with its own processor."""
    from transformers.image_utils import load_image

    model, loaded, paths = case
    answers: list[list[int]] = []
    for prompt, (_, numbers) in zip(prompts_of(loaded, paths), ASKED, strict=True):
        ids = torch.tensor([prompt.ids])
        pictures: dict[str, Any] = {}
        if numbers:
            images = [load_image(str(paths[number])) for number in numbers]
            processor = processor_of(kind=model.config.model_type)
            pictures = dict(processor(images=images, return_tensors="pt"))
            pictures["mm_token_type_ids"] = (ids == IDS["<|image_pad|>"]).int()
        out = model.generate(
            input_ids=ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            attention_mask=torch.ones_like(ids), suppress_tokens=PADDING, **pictures,
        )  # fmt: skip
        answers.append(out[0, len(prompt.ids) :].tolist())
    return answers


def continued(
    loaded: LoadedModel, prompts: list[MediaPrompt], options: EngineOptions
) -> tuple[list[list[int]], InferenceEngine]:
    """New ids of each prompt, all of them at once."""
    engine = InferenceEngine(replace(loaded, end_ids=frozenset()), options)
    numbers = [
        engine.submit(EngineRequest(tuple(prompt.ids), NEW, key=prompt.name, media=prompt.media))
        for prompt in prompts
    ]
    new: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            new[event.request] += event.tokens
    return [new[number] for number in numbers], engine


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(),
        EngineOptions(prefill_tokens=7, page_tokens=8),
        EngineOptions(max_running=1),
        EngineOptions(page_tokens=4, cache_bytes=TIGHT_TOKENS, prefix_reuse=False),
    ],
    ids=["at once", "in pieces of 7", "one after another", "preempted"],
)
def test_greedy_text_about_pictures_is_that_of_transformers(
    case: tuple[Any, LoadedModel, list[Path]], wanted: list[list[int]], options: EngineOptions
) -> None:
    _, loaded, paths = case
    if options.cache_bytes is not None:
        # Keys and values in fp32.
        config = loaded.config
        token_bytes = 2 * config.num_layers * config.kv_heads * config.head_size * 4
        options = replace(options, cache_bytes=options.cache_bytes * token_bytes)
    got, engine = continued(loaded, prompts_of(loaded, paths), options)
    assert got == wanted
    assert (engine.stats().preempted > 0) == (options.cache_bytes is not None)
    assert len({tuple(ids) for ids in got}) == len(ASKED), "pictures change the answer"


def test_a_prefix_with_a_picture_is_shared_and_another_picture_is_not(
    case: tuple[Any, LoadedModel, list[Path]], wanted: list[list[int]]
) -> None:
    _, loaded, paths = case
    prompts = prompts_of(loaded, paths)
    options = EngineOptions(page_tokens=8, max_running=1)
    got, engine = continued(loaded, [prompts[0], prompts[3], prompts[0]], options)
    assert got == [wanted[0], wanted[3], wanted[0]]
    assert engine.stats().cached_tokens > len(prompts[0].ids) - 20


def test_a_question_about_another_picture_has_another_answer(
    case: tuple[Any, LoadedModel, list[Path]],
) -> None:
    _, loaded, paths = case
    options = GenerateOptions(max_new_tokens=4)
    answers = [
        answer_media(loaded, [question_about("?", [MediaRef("image", path)])], "chatml", options)
        for path in paths[:2]
    ]
    assert answers[0][0].text != answers[1][0].text


def test_what_the_tower_cannot_read_is_refused(
    case: tuple[Any, LoadedModel, list[Path]],
) -> None:
    _, loaded, paths = case
    question = question_about("?", [MediaRef("audio", data=b"RIFF")])
    template = find_template("chatml", loaded.require_tokenizer())
    with pytest.raises(DataError, match="takes image only"):
        media_prompts(loaded, [question], template)
    engine = InferenceEngine(loaded, EngineOptions())
    (prompt,) = prompts_of(loaded, paths)[:1]
    (name,) = prompt.media.features
    features = prompt.media.features[name]
    for wrong in (
        replace(prompt.media, features={}),
        replace(prompt.media, grids={}),
        replace(prompt.media, features={name: features[1:]}),
        replace(prompt.media, features={name: features * np.nan}),
        replace(prompt.media, items=(prompt.media.items[0]._replace(offset=900),)),
        replace(prompt.media, items=prompt.media.items * 2),
    ):
        with pytest.raises(ConfigError):
            engine.submit(EngineRequest(tuple(prompt.ids), 1, media=wrong))


def test_a_folder_whose_processor_does_not_fit_answers_text_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_vision(tmp_path, tower={"patch_size": 6})
    write = (tmp_path / "preprocessor_config.json").read_text()
    assert '"patch_size": 6' in write
    loaded = load_model(tmp_path)
    assert loaded.config.vision is None
    assert "pictures are not read" in caplog.text

"""Did training help? Every run that validates says so at its end, and shows held-out prompts answered before and after."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.ranks import start_processes

from headway.config.load import load
from headway.config.shipped import find_recipe, recipe_names
from headway.errors import ConfigError
from headway.infer.generate import GenerateOptions, generate_from_ids
from headway.infer.load import load_model
from headway.train import samples, train
from headway.train.config import Recipe
from headway.train.samples import NEW_TOKENS, last_turn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("help")
    write_model(
        folder / "base", CONFIG.with_(max_seq_len=192), byte_tokenizer("<|im_start|>", "<|im_end|>")
    )
    chat = [{"instruction": f"Say {n}.", "output": f"{n}"} for n in range(60)]
    pairs = [
        {"prompt": record["instruction"], "chosen": record["output"], "rejected": "No, no."}
        for record in chat
    ]
    texts = [
        {"text": f"The number {n} comes before the number {n + 1}, and so on."} for n in range(60)
    ]
    for name, records in (("chat", chat), ("pairs", pairs), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return folder


def recipe(folder: Path, name: str, *more: str) -> Recipe:
    return load(Recipe, None, [
        f"run.dir={folder}/runs", f"run.name={name}", f"init.from={folder}/base/out", f"data.train={folder}/chat.jsonl", "data.seq_len=64",
        "data.valid.fraction=0.2", f"data.cache_dir={folder}/cache", "batch.rows=4", "steps=2", "eval.rows=4", "eval.at_start=true",
        "optim.lr=1e-2", "device=cpu", *more,
    ])  # fmt: skip


def shown(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "samples.json").read_text())["samples"]


def answers(
    model: Path,
    asked: list[dict[str, Any]],
    prefix: str = "<|im_start|>user\n",
    suffix: str | None = None,
) -> list[str]:
    """What `headway generate` writes for the same prompts."""
    loaded = load_model(model)
    assert loaded.tokenizer is not None
    end = "<|im_end|>\n<|im_start|>assistant\n" if suffix is None else suffix
    ids = [
        (
            question["prompt"],
            loaded.tokenizer.encode(prefix + question["prompt"] + end, allowed_special="all"),
        )
        for question in asked
    ]
    stop = loaded.tokenizer.token_to_id("<|im_end|>")
    assert stop is not None
    options = GenerateOptions(NEW_TOKENS, stop_ids=(stop,) if prefix else ())
    return [
        generate_from_id.text.strip()
        for generate_from_id in generate_from_ids(loaded, ids, options)
    ]


@pytest.mark.parametrize(
    "adapter", [(), ("adapter={rank: 4, targets: [q_proj, v_proj]}",)], ids=["all weights", "lora"]
)
def test_held_out_prompts_are_answered_before_and_after(
    adapter: tuple[str, ...], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"sft{len(adapter)}"
    with caplog.at_level(logging.INFO, "headway"):
        summary = train(recipe(folder, name, *adapter))
    run = folder / "runs" / name
    samples = shown(run)
    assert (
        summary["samples"] == json.loads((run / "summary.json").read_text())["samples"] == samples
    )
    assert [sample["prompt"] for sample in samples] == [
        f"Say {sample['expected']}." for sample in samples
    ]
    assert len(samples) == 2
    held_out = {sample["document"] for sample in samples}
    assert len(held_out) == 2
    assert [sample["before"]["text"] for sample in samples] == answers(folder / "base/out", samples)
    assert [sample["after"]["text"] for sample in samples] == answers(run, samples)
    assert samples[0]["before"] != samples[0]["after"]
    said = "\n".join(caplog.messages)
    assert f"held-out prompt: {samples[0]['prompt']}\n" in said
    assert "\n  before: " in said
    assert "\n  after:  " in said
    assert "tokens/s, " in said
    assert " GB of memory at most\n" in said
    before = summary["validation"]["valid"]["loss"]["before"]
    last = summary["validation"]["valid"]["loss"]["last"]
    assert (
        f"validation loss: {before:.4f} before, {last:.4f} best (step 2), {last:.4f} last" in said
    )


def test_a_resumed_run_keeps_the_answers_from_before_its_first_step(folder: Path) -> None:
    train(recipe(folder, "longer", "optim.schedule.kind=constant"))
    first = shown(folder / "runs/longer")
    (folder / "runs/longer/summary.json").unlink()
    train(recipe(folder, "longer", "optim.schedule.kind=constant", "steps=4"))
    again = shown(folder / "runs/longer")
    assert [sample["before"] for sample in again] == [sample["before"] for sample in first]
    assert [sample["after"] for sample in again] != [sample["after"] for sample in first]
    (folder / "runs/longer/samples.json").write_text("{damaged")
    train(recipe(folder, "longer", "optim.schedule.kind=constant", "steps=5"))
    assert [sample["before"] for sample in shown(folder / "runs/longer")] == [None, None]


def test_a_preference_run_asks_and_a_pretraining_continues(folder: Path) -> None:
    pairs = (
        "objective.kind=dpo",
        f"data.train={folder}/pairs.jsonl",
        "data.seq_len=128",
        "log.samples=3",
    )
    train(recipe(folder, "dpo", *pairs))
    samples = shown(folder / "runs/dpo")
    assert [sample["prompt"] for sample in samples] == [
        f"Say {sample['expected']}." for sample in samples
    ]
    assert len(samples) == 3
    assert [sample["before"]["text"] for sample in samples] == answers(folder / "base/out", samples)

    train(recipe(folder, "text", f"data.train={folder}/texts.jsonl", "log.samples=1"))
    (samples,) = shown(folder / "runs/text")
    assert samples["prompt"].startswith("The number ")
    assert f"{samples['prompt']}{samples['expected']}".replace(" ", "").endswith("andsoon.")
    assert [samples["before"]["text"]] == answers(folder / "base/out", [samples], "", "")


def test_a_sample_that_fails_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room\nfor a second model")

    monkeypatch.setattr(samples, "write_answers", broken)
    summary = train(recipe(folder, "broken"))
    assert summary["steps"] == 2
    assert summary["samples"] == []
    assert summary["validation"]["valid"]["loss"]["best"] is not None
    assert [line for line in caplog.messages if "no samples" in line] == [
        "no samples of held-out prompts: MemoryError: no room for a second model"
    ] * 2


def test_large_models_models_without_validation_and_those_that_write_no_text_have_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "LARGE_PARAMETERS", 1000)
    assert train(recipe(folder, "large"))["samples"] == []
    assert not (folder / "runs/large/samples.json").exists()
    monkeypatch.undo()
    assert train(recipe(folder, "alone", "data.valid=null", "eval.at_start=false"))["samples"] == []
    assert train(recipe(folder, "off", "log.samples=0"))["samples"] == []
    reward = ("objective.kind=reward", f"data.train={folder}/pairs.jsonl", "data.seq_len=128")
    assert train(recipe(folder, "reward", *reward))["samples"] == []
    with pytest.raises(
        ConfigError, match=r"log.samples is 1, but data.valid is null, so no prompts are held out"
    ):
        recipe(folder, "alone", "data.valid=null", "eval.at_start=false", "log.samples=1")
    with pytest.raises(ConfigError, match=r"log.samples is -1; it must be auto, or from 0 to 100"):
        recipe(folder, "alone", "log.samples=-1")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "fsdp"])
def test_ranks_answer_what_one_process_answers(layout: str, folder: Path, tmp_path: Path) -> None:
    more = ("parallel.strategy=fsdp",) if layout == "fsdp" else ()
    train(recipe(folder, f"one-{layout}"))
    start_processes(lambda: train(recipe(folder, f"two-{layout}", *more)), 2, timeout=120)
    alone = shown(folder / "runs" / f"one-{layout}")
    on_two_ranks = shown(folder / "runs" / f"two-{layout}")
    assert [sample["before"] for sample in alone] == [sample["before"] for sample in on_two_ranks]
    assert all(sample["after"] is not None for sample in on_two_ranks)


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_validates_before_its_first_step(name: str) -> None:
    loaded = load(Recipe, find_recipe(name))
    assert loaded.eval.at_start
    assert loaded.data.valid is not None
    for index in range(len(loaded.stages)):
        stage = Recipe.load(loaded.stage_settings(index))
        assert stage.eval.at_start and stage.data.valid is not None, f"stage {index}"


def test_the_last_turn_is_shown_without_the_marks_of_its_template() -> None:
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")

    def turn(text: str) -> str:
        return last_turn(tokenizer.encode(text, allowed_special="all"), tokenizer)

    assert (
        turn(
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
        )
        == "Hi there"
    )
    assert (
        turn("### Instruction:\nHi\n\n### Response:\n") == "### Instruction:\nHi\n\n### Response:"
    )
    assert turn("<|im_start|>user\nuser stories?<|im_end|>") == "user stories?"

"""What training changed: numbers from before the first step, and one report of answers and curves side by side."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic, make_stores, tiny_settings

from headway.cli import main
from headway.config.load import load
from headway.errors import ConfigError
from headway.eval.options import ContinuationOptions
from headway.export.huggingface import export_model
from headway.infer.generate import GenerateOptions, generate_from_ids
from headway.infer.load import load_model
from headway.tokenizer.chat import Turn, answer_end, render_prompt
from headway.train import train
from headway.train.config import Recipe
from headway.train.meter import AT_START

pytestmark = pytest.mark.slow

QUESTIONS = ["Say 3.", "What comes after 5?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    make_stores(folder)
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    write_model(folder / "base", CONFIG.with_(max_seq_len=192), tokenizer)
    chat = [{"instruction": f"Say {n}.", "output": f"{n}"} for n in range(60)]
    pairs = [
        {"prompt": record["instruction"], "chosen": record["output"], "rejected": "No, no."}
        for record in chat
    ]
    for name, records in (("chat", chat), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return folder


def recipe(folder: Path, name: str, *more: str) -> Recipe:
    return load(
        Recipe,
        None,
        [
            *tiny_settings(folder, name),
            "steps=4",
            "eval.at_start=true",
            "checkpoint.every=2",
            *more,
        ],
    )


def post(folder: Path, name: str, *more: str) -> Recipe:
    return load(Recipe, None, [
        f"run.dir={folder}", f"run.name={name}", "data.seq_len=128", "data.valid.fraction=0.2", f"data.cache_dir={folder}/cache",
        "batch.rows=4", "batch.micro_rows=4", "steps=3", "eval.rows=8", "eval.at_start=true", "optim.lr=1e-3", "device=cpu", *more,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """An SFT run and a preference run that starts from it."""
    chat = f"data.train=[{{path: {folder}/chat.jsonl, kind: chat, chat_template: chatml}}]"
    pairs = f"data.train=[{{path: {folder}/pairs.jsonl, kind: preference, chat_template: chatml}}]"
    train(post(folder, "sft", f"init.from={folder}/base/out", chat))
    train(post(folder, "dpo", f"init.from={folder}/sft", pairs, "objective.kind=dpo"))
    return folder


def records(run: Path) -> list[dict[str, Any]]:
    return deterministic(run / "metrics.jsonl")


@pytest.fixture(scope="module")
def looked(folder: Path) -> Path:
    train(recipe(folder, "looked", "track=[{kind: tensorboard}]"))
    return folder / "looked"


def test_a_validation_before_the_first_step_is_that_of_the_first_weights_and_changes_nothing(
    folder: Path, looked: Path
) -> None:
    train(recipe(folder, "plain", "eval.at_start=false"))
    train(recipe(folder, "still", "optim.lr=0", "steps=1"))
    plain = records(folder / "plain")
    written = records(looked)
    before = written[0].pop(AT_START)
    assert written == plain
    assert AT_START not in plain[0]
    assert before == records(folder / "still")[0]["valid"] != written[1]["valid"]
    summary = json.loads((looked / "summary.json").read_text())
    assert summary["first_valid_loss"] == before["valid"]["loss"] > summary["last_valid_loss"]


def test_trackers_have_it_at_step_zero(looked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(looked / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("valid/loss")] == [0, 2, 4]
    assert not [tag for tag in events.Tags()["scalars"] if AT_START in tag]


def test_a_resumed_run_and_two_ranks_have_it_once_and_the_same(folder: Path, looked: Path) -> None:
    train(recipe(folder, "resumed"))
    (folder / "resumed" / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    (folder / "resumed" / "summary.json").unlink()
    train(recipe(folder, "resumed"))
    assert_same_run(looked, folder / "resumed", 4)
    assert (folder / "resumed" / "train.log").read_text().count("validated at the start: ") == 1
    start_processes(lambda: train(recipe(folder, "ranks")), 2, timeout=120)
    resumed = records(looked)[0][AT_START]["valid"]
    on_two_ranks = records(folder / "ranks")[0][AT_START]["valid"]
    assert on_two_ranks == pytest.approx(resumed, rel=1e-5)


def test_it_needs_something_to_validate(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.at_start is true, but data.valid is null"):
        recipe(folder, "nothing", "data.valid=null")


def test_a_preference_run_begins_at_ln_2_and_without_rewards(trained: Path) -> None:
    before = records(trained / "dpo")[0][AT_START]["valid"]
    assert before["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (before["rewards/accuracies"], before["rewards/margins"]) == (0.5, 0)


def compare(trained: Path, out: Path, *more: str) -> list[str]:
    models = [str(trained / "base" / "out"), str(trained / "sft"), str(trained / "dpo")]
    asked = [word for question in QUESTIONS for word in ("--prompt", question)]
    how = ["--chat-template", "chatml", "--temperature", "0", "--max-new-tokens", "8"]
    return ["eval", "compare", *models, *asked, *how, "--out", str(out), *more]


def test_one_command_sets_answers_and_validations_side_by_side(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(compare(trained, tmp_path / "report", "--json")) == 0
    base, sft, dpo = json.loads(capsys.readouterr().out)["models"]
    assert base["training"] == []
    assert [sample["prompt"] for sample in base["samples"]] == QUESTIONS
    loaded = load_model(trained / "dpo")
    assert loaded.tokenizer is not None
    ids = [
        (question, render_prompt([Turn("user", question)], "chatml", loaded.tokenizer))
        for question in QUESTIONS
    ]
    ends = answer_end("chatml", loaded.tokenizer)
    assert loaded.tokenizer.decode(list(ends)) == "<|im_end|>"
    assert len({stage["samples"][0]["text"] for stage in (base, sft, dpo)}) > 1, (
        "else nothing is shown here"
    )
    assert [sample["text"] for sample in dpo["samples"]] == [
        generate_from_id.text
        for generate_from_id in generate_from_ids(loaded, ids, GenerateOptions(8, stop_ids=ends))
    ]
    report = (tmp_path / "report" / "report.md").read_text()
    for run, stage in (("sft", sft), ("dpo", dpo)):
        (curves,) = stage["training"]
        first, last = curves["valid"]["valid"]
        assert (first["step"], last["step"], curves["steps"]) == (0, 3, 3)
        assert first["numbers"] == records(trained / run)[0][AT_START]["valid"]
        for number in set(last["numbers"]) - {"tokens"}:
            values = [
                f"{point['numbers'][number]:.4f} (step {point['step']})" for point in (first, last)
            ]
            assert f"| {trained / run} | valid | {number} | {values[0]} | {values[1]} |" in report
    for question in QUESTIONS:
        assert report.count(f"    {question}") == 1
    assert report.count("answers:") == 6
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "report.md",
        "results.json",
        "training.png",
    ]
    assert (tmp_path / "report" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert main(compare(trained, tmp_path / "report")) == 0
    assert "rewards/accuracies" in capsys.readouterr().out


def test_generate_answers_as_the_report_does(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(compare(trained, tmp_path / "report", "--json")) == 0
    shown = [
        sample["text"] for sample in json.loads(capsys.readouterr().out)["models"][1]["samples"]
    ]
    asked = [word for question in QUESTIONS for word in ("--prompt", question)]
    ask = [
        "generate",
        "--model",
        str(trained / "sft"),
        *asked,
        "--max-new-tokens",
        "8",
        "--chat-template",
    ]
    assert main([*ask, "chatml", "--json"]) == 0
    assert [
        generation["text"] for generation in json.loads(capsys.readouterr().out)["generations"]
    ] == shown
    for wrong, word in (
        (["chatml", "--special"], "--chat-template and --special are both given"),
        (["nothing"], "template is 'nothing'"),
    ):
        assert main([*ask, *wrong]) == 2
        assert word in capsys.readouterr().err


def test_what_was_trained_carries_the_template_it_learned(trained: Path, tmp_path: Path) -> None:
    export_model(trained / "sft", tmp_path / "exported")
    question = [Turn("user", QUESTIONS[0])]
    for model in (
        trained / "sft",
        trained / "sft" / "final",
        trained / "dpo" / "final",
        tmp_path / "exported",
    ):
        tokenizer = load_model(model).tokenizer
        assert tokenizer is not None and tokenizer.chat_template is not None, model
        assert render_prompt(question, "tokenizer", tokenizer) == render_prompt(
            question, "chatml", tokenizer
        )
    assert "gets the chat template chatml" in (trained / "sft" / "train.log").read_text()
    assert not (trained / "dpo" / "tokenizer").exists(), "the model it starts from has it already"


def test_stages_have_their_own_curves(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(folder, "staged", "stages=[{name: one, steps: 2}, {name: two, steps: 2}]"))
    from headway.train.history import read_training

    first, second = read_training(folder / "staged")
    assert [first.run, second.run] == [f"{folder}/staged: 01-one", f"{folder}/staged: 02-two"]
    for stage in (first, second):
        assert [point.step for point in stage.valid["valid"]] == [0, 2]
        assert [step for step, _ in stage.loss] == [1, 2]
    assert second.valid["valid"][0].numbers == first.valid["valid"][1].numbers, (
        "the second begins with what the first left"
    )


def test_a_template_without_a_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--chat-template is 'chatml', and there is no prompt"):
        ContinuationOptions(template="chatml").check()

"""Names that people bring from other trainers are answered with headway's, and the model may stand right after the verb."""

from pathlib import Path
from typing import Any

import pytest
import typer

from headway.cli import build_app, main


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (["--lr", "1e-4"], "optim.lr=0.0001"),
        (["--lr"], "optim.lr=VALUE"),
        (["--learning_rate=2e-5"], "optim.lr=2e-05"),
        (["learning_rate=2e-5"], "optim.lr=2e-05"),
        (["optim.learning_rate=2e-5"], "optim.lr=2e-05"),
        (["--num_train_epochs", "3"], "epochs=3"),
        (["num_train_epochs=3"], "epochs=3"),
        (["--per_device_train_batch_size", "4"], "batch.rows_per_rank=4"),
        (["lora_r=8"], "adapter.rank=8"),
        (["--lora-rank", "8"], "adapter.rank=8"),
        (["--model_name_or_path", "Qwen/Qwen3-0.6B"], "init.from=Qwen/Qwen3-0.6B"),
        (["--model", "Qwen/Qwen3-0.6B"], "init.from=Qwen/Qwen3-0.6B"),
        (["model=Qwen/Qwen3-0.6B"], "init.from=Qwen/Qwen3-0.6B"),
        (["base_model=Qwen/Qwen3-0.6B"], "init.from=Qwen/Qwen3-0.6B"),
        (["--dataset", "chat.jsonl"], "data.train=chat.jsonl"),
        (["--max_seq_length", "512"], "data.seq_len=512"),
        (["--bf16"], "precision=bf16"),
        (["--optim.lr", "3e-4"], "optim.lr=3e-4"),
        (["--config", "my.yaml"], "headway train my.yaml"),
        (["push_to_hub=true"], "headway push RUN USER/NAME"),
        (["hub_model_id=me/mine"], "headway push RUN me/mine"),
        (["--beta", "0.3"], "objective.beta=0.3"),
        (["loss_type=ipo"], "objective.loss_type=ipo"),
        (["max_prompt_length=512"], "data.seq_len"),
        (["--completion_only_loss", "true"], "on its answers alone"),
        (["dataset_text_field=body"], "data.train.0.text_key=body"),
        (["--precompute_ref_log_probs", "true"], "objective.reference_logps=cached"),
    ],
)
def test_another_trainers_name_is_answered_with_ours(
    words: list[str], ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "lora", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert ours in err


def test_a_name_inside_a_section_that_needs_no_setting_keeps_the_hint_of_the_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "lora", "eval.evry=3", "data.streaming=true"]) == 2
    err = capsys.readouterr().err
    assert "eval.evry is not a setting; did you mean 'every'?" in err
    assert "data.streaming is not a setting; " in err
    assert "headway data tokenize" not in err


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("preset=gemma3-1b", "model.preset"),
        ("encoders.audio=null", "model.aligner.encoders"),
        ("keep_last=2", "checkpoint.keep_last"),
    ],
)
def test_a_setting_without_its_section_is_answered_with_its_section(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "pretrain", word]) == 2
    assert f"is not a setting; did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["chat", "generate", "serve", "eval ppl", "export hf"])
def test_verbs_with_a_model_say_how_it_is_given(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "--model_name_or_path", "X"]) == 2
    assert "give --model X" in capsys.readouterr().err


def test_an_option_nobody_knows_keeps_the_plain_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lora", "--qqqq"]) == 2
    assert capsys.readouterr().err == "error: No such option: --qqqq. Try 'headway train --help'.\n"


def verbs_with_a_model(command: Any, words: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """The verbs that have --model, each with the names of its arguments."""
    inner = getattr(command, "commands", None)
    if inner is not None:
        return {
            verb: names
            for name, subcommand in inner.items()
            for verb, names in verbs_with_a_model(subcommand, (*words, name)).items()
        }
    if not any("--model" in parameter.opts for parameter in command.params):
        return {}
    return {
        " ".join(words): {
            parameter.name or ""
            for parameter in command.params
            if parameter.param_type_name == "argument"
        }
    }


def test_every_verb_with_a_model_takes_it_as_an_argument() -> None:
    verbs = verbs_with_a_model(typer.main.get_command(build_app()))
    assert {
        "chat",
        "generate",
        "serve",
        "eval ppl",
        "eval harness",
        "export hf",
        "export gguf",
        "masks export",
        "masks show",
    } <= set(verbs)
    # There it is the name of a model on a server.
    assert [verb for verb, names in verbs.items() if "model_argument" not in names] == [
        "data self-instruct"
    ]


def test_the_argument_means_the_same_as_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = str(tmp_path / "gone")
    for words in (
        ["generate", "--prompt", "a"],
        ["export", "hf", "--out", str(tmp_path / "out")],
        ["eval", "ppl", "--data", __file__],
    ):
        assert main([*words, "--model", gone]) == 2
        by_option = capsys.readouterr().err
        assert main([*words, gone]) == 2
        by_argument = capsys.readouterr().err
        assert gone in by_argument
        assert by_argument == by_option


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "--prompt", "a"],
        ["chat"],
        ["serve"],
        ["export", "hf", "--out", "x"],
        ["masks", "show"],
    ],
)
def test_two_models_are_refused_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "runs/a", "--model", "runs/b"]) == 2
    assert (
        capsys.readouterr().err
        == "error: the model is given twice: runs/a, and --model runs/b. Leave one of them out.\n"
    )


@pytest.mark.parametrize(
    "words", [["generate", "--prompt", "a"], ["chat"], ["serve"], ["export", "hf", "--out", "x"]]
)
def test_no_model_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no model is given. ")
    assert err.count("\n") == 1
    assert "--model" in err

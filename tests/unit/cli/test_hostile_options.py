"""Numbers and texts nobody means: every option of generate, eval, masks and sparsify takes them or refuses them in one line."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from support.byte_model import CONFIG, write_model

from headway.cli import build_app, main
from headway.model.config import HeadGatesConfig
from headway.model.head_masks.gates_file import write_gates

HOSTILE = ("nan", "inf", "-1", str(10**14), "1e-320", "9" * 5000, "", "a\0b", "²")
SKIPPED = ("help", "json", "device", "precision", "nproc", "gpus")
NUMBERS = (
    "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--stream-window", "--stream-sinks", "--chunk-tokens",
    "--window", "--stride", "--batch-tokens", "--max-samples", "--samples", "--lengths", "--depths", "--sparsities", "--sparsity", "--rows",
)  # fmt: skip
VERBS = {
    "generate": "--model $/model --prompt the --stop e --max-new-tokens 2 --temperature 1 --device cpu",
    "eval ppl": "--model $/model --data $/text.txt --device cpu",
    "eval long": "--model $/model --tasks key_value --lengths 64 --depths 0 --samples 1 --rows 1 --device cpu",
    "masks export": "--model $/model --out $/masks.tsv",
    "masks show": "--model $/model",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_model(folder, CONFIG.with_(max_seq_len=128)).rename(folder / "model")
    write_gates(
        folder / "model",
        HeadGatesConfig(window=6, sinks=2),
        torch.tensor([[9.0, -7.0], [-8.0, -6.0]]),
    )
    (folder / "text.txt").write_text("the cat sat on the mat")
    (folder / "work").mkdir()
    return folder


def options(verb: str) -> Iterator[str]:
    """The options of a verb that take a value."""
    command = typer.main.get_command(build_app())
    for name in verb.split():
        command = command.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    for parameter in command.params:
        if (
            parameter.name not in SKIPPED
            and parameter.opts[0].startswith("--")
            and not getattr(parameter, "is_flag", False)
        ):
            yield parameter.opts[0]


def check(
    world: Path, verb: str, cases: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*verb.split(), *VERBS[verb].replace("$", str(world)).split()]
    assert cases
    with contextlib.chdir(world / "work"):  # where an option that names a file may write it
        for option, value in cases:
            code = main([*arguments, f"{option}={value}"])
            said = [
                line for line in capsys.readouterr().err.splitlines() if line.startswith("error")
            ]
            assert (code, len(said)) in ((0, 0), (2, 1)), (option, value, said)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "masks show"])
def test_every_number_is_taken_or_refused_in_one_line(
    world: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [option for option in options(verb) if option in NUMBERS]
    check(world, verb, [(option, value) for option in numbers for value in HOSTILE[:4]], capsys)


@pytest.mark.drill
@pytest.mark.parametrize("verb", VERBS)
def test_every_option_takes_or_refuses_hostile_values_in_one_line(
    world: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(world, verb, [(option, value) for option in options(verb) for value in HOSTILE], capsys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--temperature", "inf"],
            "--temperature is inf; it must be 0 (likeliest token) or more, and finite",
        ),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--top-p", "nan"], "--top-p is nan"),
        (
            ["--prompts-file", "/dev/full"],
            "prompts-file is '/dev/full', which is a device or a pipe; a file is expected",
        ),
    ],
)
def test_sampling_options_that_are_not_finite_are_refused(
    world: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags[1].startswith("/dev/") and not os.path.exists(flags[1]):
        pytest.skip("no such device")
    arguments = ["--model", str(world / "model"), "--device", "cpu", "--prompt", "a", *flags]
    assert main(["generate", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_samples_of_an_evaluation_are_refused_before_anything_is_scored(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.infer.load.load_model", lambda *_, **__: pytest.fail("loaded"))
    common = [
        "eval",
        "ppl",
        "--model",
        str(world / "model"),
        "--data",
        str(world / "text.txt"),
        "--prompt",
        "a",
        "--device",
        "cpu",
    ]
    for flags, said in (
        (["--temperature", "inf"], "--temperature is inf"),
        (["--max-new-tokens", "0"], "max-new-tokens is 0"),
        (["--samples", str(10**14)], "--samples is 100000000000000"),
        (["--window", "1"], "--window is 1"),
        (["--batch-tokens", str(10**14)], "--batch-tokens is 100000000000000"),
    ):
        assert main([*common, *flags]) == 2
        assert said in capsys.readouterr().err


def test_tokens_beyond_the_context_are_reported(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["generate", "--model", str(world / "model"), "--device", "cpu", "--prompt", "the"]
    assert main([*common, "--max-new-tokens", str(10**14)]) == 0
    assert (
        "max-new-tokens is 100000000000000; the model's max_seq_len=128 leaves room for only 125"
        in capsys.readouterr().err
    )
    assert main([*common, "--max-new-tokens", "125"]) == 0
    assert "leaves room" not in capsys.readouterr().err

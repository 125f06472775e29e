"""The tutorial's commands, read from the page and run in order: shortened in every test run, as they stand in a drill."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headway.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", PAGE)
COMMANDS = [line for kind, block in BLOCKS for line in block.splitlines() if not kind]
SCRIPT = next(block for kind, block in BLOCKS if kind == "python")
SHORT = {
    "steps": "steps=2",
    "epochs": "steps=2",
    "--vocab-size": "512",
    "--max-new-tokens": "4",
    "--max-samples": "1",
}
SMALL = [
    "model.hidden_size=64",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.ffn_size=128",
]


def shortened(words: list[str]) -> list[str]:
    """The same command with fewer steps and a smaller model."""
    shortened_words = [
        SHORT.get(before, word) for before, word in zip(["", *words], words, strict=False)
    ]
    shortened_words = [
        SHORT[word.split("=")[0]] if word.split("=")[0] in SHORT and "=" in word else word
        for word in shortened_words
    ]
    is_first = shortened_words[:2] == ["train", "pretrain"]
    return [
        *shortened_words,
        *(SMALL if is_first else []),
        *(["eval.rows=2", "eval.at_start=false"] if shortened_words[0] == "train" else []),
    ]


def run_page(folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_short: bool) -> list[list[str]]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    script = SCRIPT.replace('.glob("*.py")', '.glob("[a-c]*.py")') if is_short else SCRIPT
    (folder / "make_data.py").write_text(script, encoding="utf-8")
    done: list[list[str]] = []
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if not words or words[0] == "pip":
            continue
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], cwd=folder, check=True)
        else:
            assert words[0] == "headway"
            arguments = shortened(words[1:]) if is_short else words[1:]
            if words[1] == "chat":
                # what a person would type
                monkeypatch.setattr(sys, "stdin", io.StringIO("What does os.getcwd do?\n"))
            assert main(arguments) == 0, arguments
        done.append(words)
    return done


def test_every_command_of_the_tutorial_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_page(tmp_path, monkeypatch, is_short=True)
    assert (
        len(done)
        == len([line for line in COMMANDS if line.startswith(("headway", "python"))])
        >= 10
    )
    assert (tmp_path / "my-model" / "model.safetensors").exists()
    assert (tmp_path / "report" / "report.md").exists()


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_the_tutorial_as_it_stands_gives_a_model_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_page(tmp_path, monkeypatch, is_short=False)
    losses = [float(loss) for loss in re.findall(r"valid/loss ([\d.]+)", capfd.readouterr().err)]
    assert len(losses) > 4
    assert min(losses) < 0.8 * losses[0]

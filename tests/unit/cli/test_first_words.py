"""The first words a person types: nothing, --version, a mistake, Tab. Help is no error, and nothing of this loads torch."""

import os
import subprocess
import sys

import pytest

from headway import __version__
from headway.cli import main
from headway.cli._group import OTHER_SECTION


@pytest.mark.parametrize("words", [[], ["data"], ["config"]])
def test_help_is_the_answer_to_no_verb(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: {' '.join(['headway', *words])}")
    heading = "Commands:" if words else "Start here:"
    assert heading in out
    assert err == ""


def test_every_verb_stands_under_a_heading_with_its_whole_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "..." not in out.partition("Start here:")[2]
    assert max(map(len, out.splitlines())) <= 80
    assert f"\n{OTHER_SECTION}:" not in out, "a verb has no heading: name it in SECTIONS"
    assert "from the newest complete checkpoint." in " ".join(out.split())


@pytest.mark.parametrize("group", ["data", "eval", "launch", "config", "doctor", "verify", "masks"])
def test_help_of_a_group_is_whole_at_80_columns(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([group, "--help"]) == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert commands
    assert "..." not in commands
    assert max(map(len, commands.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["train"], "headway train [OPTIONS] [RECIPE] [section.key=value]..."),
        (["data", "tokenize"], "headway data tokenize [OPTIONS] [FILE]..."),
        (["data", "merge"], "headway data merge [OPTIONS] STORE..."),
        (["report"], "headway report [OPTIONS] RUN..."),
        (["chat"], "headway chat [OPTIONS] [MODEL]..."),
        (["generate"], "headway generate [OPTIONS] [MODEL]"),
    ],
)
def test_usage_has_no_brackets_of_brackets_and_no_types_of_python(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"Usage: {usage}"
    assert "list[" not in out


@pytest.mark.parametrize(
    ("commit", "line"),
    [
        ("commit 0123456789ab, modified", f"headway {__version__} (commit 0123456789ab, modified)"),
        (None, f"headway {__version__}"),
    ],
)
def test_the_version_is_printed_with_its_commit_where_it_is_known(
    commit: str | None,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.runtime.machine.source_commit", lambda: commit)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian"], "`headway train`"),
        (["data", "tokenise"], "`headway data tokenize`"),
        (["tokenize"], "`headway data tokenize`"),
        (["finetune"], "`headway train lora`"),
        (["version"], "`headway --version`"),
        (["help"], "`headway --help`"),
        (["eval", "perplexity"], "`headway eval ppl`"),
        (["eval", "tokenise"], "`headway data tokenize`"),
    ],
)
def test_a_verb_that_is_not_there_names_the_one_that_is(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"has no verb {words[-1]!r}. Did you mean {meant}?" in err


def test_a_word_like_no_verb_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qqqqq"]) == 2
    assert (
        capsys.readouterr().err
        == "error: headway has no verb 'qqqqq'. `headway --help` lists them.\n"
    )


COMPLETE = """
import sys
from headway.cli import main
try:
    main([])
finally:
    assert "torch" not in sys.modules
"""


def complete(words: str) -> list[str]:
    """What fish is offered for a line that ends at the cursor."""
    environment = {
        **os.environ,
        "_HEADWAY_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "AssertionError" not in done.stderr, done.stderr
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


def test_the_shell_completes_verbs_settings_and_kinds_without_torch() -> None:
    assert "tokenize" in complete("headway data to")
    assert {"data.seq_len=", "data.valid."} <= set(complete("headway train data."))
    assert {"lora", "laptop/lora"} <= set(complete("headway train l"))
    assert "node/sft" in complete("headway train node/s")
    assert complete("headway train objective.kind=next") == ["objective.kind=next_token"]
    assert complete("headway train data.packing=b") == ["data.packing=best_fit"]

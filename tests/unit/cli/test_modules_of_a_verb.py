"""A command line imports the modules of its verb alone, and finds the same verb as with all of them."""

import subprocess
import sys

import pytest
import typer

from headway.cli import ELSEWHERE, _find_verbs, build_app

VERBS = _find_verbs(())


@pytest.mark.parametrize("words", sorted(VERBS))
def test_a_verb_is_the_same_without_the_others(words: str) -> None:
    verbs = _find_verbs(words.split())
    assert verbs[words] is VERBS[words]
    assert len(verbs) < len(VERBS)


def test_every_word_with_another_module_begins_a_verb() -> None:
    assert ELSEWHERE.keys() <= {words.split()[0] for words in VERBS}


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["trian"], ["data"], ["data", "serve"], ["doctor", "dta"]]
)
def test_help_and_unknown_words_know_all_verbs(words: list[str]) -> None:
    command = typer.main.get_command(build_app(words))
    assert {"train", "serve", "data", "doctor"} <= set(command.commands)  # pyright: ignore[reportAttributeAccessIssue]


def test_the_help_of_one_verb_imports_no_other() -> None:
    script = (
        "import sys; from headway.cli import main; code = main(['serve', '--help']);"
        " sys.exit(code or 'headway.cli.train' in sys.modules or 'headway.cli.serve' not in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

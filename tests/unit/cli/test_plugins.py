"""Verbs of other packages: listed without being imported, called with their options; a broken one breaks nothing but itself."""

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from headway.cli import _plugins, main

CODE = """
import sys
import typer
from pathlib import Path

def hello(name: str, times: int = typer.Option(1, help="How often."), out: Path | None = None) -> None:
    "Greet somebody."
    from headway.errors import ConfigError
    if times < 1:
        raise ConfigError(f"--times is {times}; it must be 1 or more.")
    for _ in range(times):
        print("hello", name)

def untyped(thing) -> None: ...

NOT = 3
"""


@pytest.fixture(autouse=True)
def _plugins_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_lab.py").write_text(CODE)
    (tmp_path / "their_wreck.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("their_lab", "their_wreck"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    values = {
        "hello": "their_lab:hello",
        "broken": "their_wreck:f",
        "gone": "their_none:f",
        "odd": "their_lab:NOT",
        "train": "their_lab:hello",
    }
    entry_points = [EntryPoint(name, value, _plugins.GROUP) for name, value in values.items()]
    monkeypatch.setattr(_plugins, "_entry_points", lambda: entry_points)


def test_help_lists_plugins_and_imports_none(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "hello" in shown
    assert "their_lab:hello of an unknown package" in shown
    assert "broken" in shown
    assert "data" in shown
    assert "their_lab" not in sys.modules
    assert "their_wreck" not in sys.modules
    assert "the verb train of an unknown package is left out" in caplog.text


def test_verbs_of_headway_do_not_look_for_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_plugins, "_entry_points", lambda: pytest.fail("looked"))
    assert main(["train", "--help"]) == 0
    assert main(["data", "tokenize", "--help"]) == 0


def test_a_plugin_takes_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "you", "--times", "2"]) == 0
    assert capsys.readouterr().out == "hello you\nhello you\n"


def test_the_help_of_a_plugin_is_that_of_its_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Greet somebody." in shown
    assert "How often." in shown
    assert "Usage: headway hello" in shown


def test_an_error_of_a_plugin_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hello", "you", "--times", "0"]) == 2
    assert capsys.readouterr().err == "error: --times is 0; it must be 1 or more.\n"
    assert main(["hello", "you", "--nothing"]) == 2


def test_a_verb_that_no_plugin_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["helo"]) == 2
    assert "has no verb 'helo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (
            "broken",
            r"the verb broken of an unknown package (their_wreck:f) cannot be imported: ZeroDivisionError",
        ),
        ("gone", "cannot be imported: ModuleNotFoundError: No module named 'their_none'"),
        ("odd", "is no function"),
    ],
)
def test_a_broken_plugin_breaks_only_itself(
    verb: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert main(["list", "--help"]) == 0

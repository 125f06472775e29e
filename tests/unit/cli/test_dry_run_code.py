"""A dry run of somebody's recipe imports and starts nothing that the recipe names."""

import json
import sys
from pathlib import Path

import pytest

from headway.cli import main
from headway.config.external_code import find_external_code

MODULE = "open({marker!r}, 'w').close()\n"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that leaves a mark when it is imported."""
    (tmp_path / "strange_lab").mkdir()
    (tmp_path / "strange_lab" / "__init__.py").write_text("")
    (tmp_path / "strange_lab" / "loss.py").write_text(MODULE.format(marker=str(tmp_path / "ran")))
    for name in [name for name in sys.modules if name.split(".")[0] == "strange_lab"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "override",
    [
        "objective.kind=strange_lab.loss",
        "objective=strange_lab.loss",
        "model.family=strange_lab.loss",
        "track=[strange_lab.loss]",
        "parallel.hook={kind: torch_style, function: 'strange_lab.loss:f'}",
        "stages=[{name: a, optim: {kind: strange_lab.loss}}]",
        "callbacks=['strange_lab.loss:Mine']",
        "data.train=[{path: a.txt, format: strange_lab.loss}]",
    ],
)
def test_a_dry_run_names_the_code_and_imports_nothing(
    lab: Path, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", override, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "strange_lab.loss" in shown
    assert "nothing was imported" in shown
    assert not (lab / "ran").exists()
    assert main(["train", override, "--dry-run", "--json"]) == 0
    assert "strange_lab.loss" in json.loads(capsys.readouterr().out)["would_run"][0]
    assert not (lab / "ran").exists()


@pytest.mark.parametrize(
    "override", ["objective=./strange_lab/loss.py", "callbacks=['./strange_lab/loss.py:Mine']"]
)
def test_a_dry_run_names_a_file_and_does_not_import_it(
    lab: Path, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", override, "--dry-run"]) == 0
    assert "./strange_lab/loss.py" in capsys.readouterr().out
    assert not (lab / "ran").exists()
    assert main(["train", override, "--dry-run", "--with-code"]) == 2
    assert (lab / "ran").exists()


def test_with_code_a_dry_run_imports_it(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "objective.kind=strange_lab.loss", "--dry-run", "--with-code"]) == 2
    assert "has no class Config" in capsys.readouterr().err
    assert (lab / "ran").exists()


def test_the_flag_is_refused_where_it_would_do_nothing(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "steps=1", "--with-code"]) == 2
    assert "--with-code is given without --dry-run" in capsys.readouterr().err


def test_programs_are_listed_and_need_no_import() -> None:
    (program,) = find_external_code(
        {
            "track": [{"kind": "alert", "form": "command", "command": ["notify", "me"]}],
            "optim": "adamw",
        }
    )
    assert str(program) == "track.0.command starts notify me"
    assert not program.is_imported


def test_a_module_of_the_users_that_fails_is_named_with_its_line(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lab / "strange_lab" / "bad.py").write_text("x = 1\ny = x / 0\n")
    (lab / "strange_lab" / "worse.py").write_text("def f(:\n")
    for name, words in {
        "bad": ["ZeroDivisionError", "bad.py:2"],
        "worse": ["SyntaxError", "worse.py:1"],
    }.items():
        assert main(["config", "show", f"objective.kind=strange_lab.{name}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert all(word in line for word in words), line

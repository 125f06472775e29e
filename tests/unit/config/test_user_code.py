"""Code from a file in the working directory: imported by its path, once per content; Python's path stays as it is."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from headway.config.external_code import find_external_code
from headway.config.user_code import UserFiles, import_user_module
from headway.errors import ConfigError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_file_is_imported_once_and_again_when_it_changes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\n"
    )
    before = list(sys.path)
    first = import_user_module("./mine.py", "kind")
    assert import_user_module(str(tmp_path / "mine.py"), "kind") is first
    assert first.A().x == 1
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert import_user_module("./mine.py", "kind").x == 2
    assert sys.path == before
    assert "mine" not in sys.modules
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (
            "./none.py",
            None,
            r"kind is './none.py', but there is no such file \(working directory: .*\)",
        ),
        ("./folder/", None, "a file of your own ends in .py"),
        ("./bad.py", "x = (", r"importing it fails: SyntaxError: .*bad.py:1\)"),
        (
            "./bad.py",
            "\n1 / 0",
            r"importing it fails: ZeroDivisionError: division by zero \(.*bad.py:2\)",
        ),
        (
            "./bad.py",
            "import not_installed_at_all",
            "imports 'not_installed_at_all', but that is not installed",
        ),
    ],
)
def test_a_wrong_file_is_one_line(
    name: str, code: str | None, message: str, tmp_path: Path
) -> None:
    if code is not None:
        (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=message) as caught:
        import_user_module(name, "kind")
    assert "\n" not in str(caught.value)


def test_another_process_can_unpickle_objects_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class A:\n    def __init__(self):\n        self.x = 5\n")
    data = pickle.dumps((UserFiles(), import_user_module("./mine.py", "kind").A()))
    code = f"import pickle; print(pickle.loads({data!r})[1].x)"
    assert (
        subprocess.run(
            [sys.executable, "-P", "-c", code], cwd="/", capture_output=True, text=True, check=True
        ).stdout
        == "5\n"
    )


def test_files_and_callbacks_are_listed_as_external_code() -> None:
    external = list(
        find_external_code(
            {
                "objective": "./l.py",
                "optim": {"kind": "./o.py"},
                "callbacks": ["./c.py:Mine"],
                "track": ["./t.py"],
            }
        )
    )
    assert [(code.key, code.module, code.is_imported) for code in external] == [
        ("objective", "./l.py", True), ("optim.kind", "./o.py", True), ("callbacks.0", "./c.py", True), ("track.0", "./t.py", True),
    ]  # fmt: skip
    assert str(external[0]) == "objective imports the file ./l.py"

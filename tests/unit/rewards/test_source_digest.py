"""A digest changes with the code of a user and with all that this code imports."""

import importlib
import sys
from pathlib import Path

import pytest

from headway.rewards import source_digest
from headway.rewards.source_digest import code_digest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


def test_a_module_that_is_imported_counts(folder: Path) -> None:
    mine = write(folder / "mine.py", "def reward():\n    import words_of_mine\n")
    write(folder / "words_of_mine.py", "from deeper_of_mine import x\n")
    deeper = write(folder / "deeper_of_mine.py", "x = 1\n")
    before = code_digest(mine)
    assert code_digest(mine) == before
    write(deeper, "x = 2\n")
    assert code_digest(mine) != before


def test_all_modules_of_its_package_count(folder: Path) -> None:
    write(folder / "lab" / "__init__.py", "")
    mine = write(folder / "lab" / "rewards" / "mine.py", "from ..words import x\n")
    write(folder / "lab" / "rewards" / "__init__.py", "")
    words = write(folder / "lab" / "words.py", "x = 1\n")
    before = code_digest(mine)
    write(words, "x = 2\n")
    assert code_digest(mine) != before


def test_the_version_of_an_installed_package_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = write(folder / "mine.py", "import numpy\n")
    before = code_digest(mine)
    monkeypatch.setattr(source_digest, "version", lambda name: "0.0.1")
    assert code_digest(mine) != before


def test_modules_that_import_each_other_end(folder: Path) -> None:
    mine = write(folder / "mine.py", "import first_of_two\n")
    write(folder / "first_of_two.py", "import second_of_two\n")
    write(folder / "second_of_two.py", "import first_of_two\n")
    assert code_digest(mine) == code_digest(mine)


def test_nothing_is_imported(folder: Path) -> None:
    mine = write(folder / "mine.py", "import explosive_module\n")
    write(folder / "explosive_module.py", "raise SystemExit\n")
    code_digest(mine)
    assert "explosive_module" not in sys.modules


@pytest.mark.parametrize("source", ["def (", "import nothing_of_this_name", "\0", ""])
def test_code_that_cannot_be_imported_has_a_digest(folder: Path, source: str) -> None:
    assert len(code_digest(write(folder / "mine.py", source))) == 64

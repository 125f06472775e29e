"""What ARCHITECTURE.md and the contracts and rules of docs/internals.md name exists: packages, files and names of the code. None is left out."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headway"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
INTERNALS = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
CONTRACTS, _, RULES = (
    INTERNALS.partition("## Contracts")[2].partition("## Settings")[0].partition("## One rule each")
)
TEXT = PAGE + CONTRACTS + RULES
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
FILES = [
    text for text in QUOTED if re.fullmatch(r"[\w./-]+\.(py|js|json|jinja|md|toml|yaml|yml)", text)
]
FOLDERS = [text for text in QUOTED if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/", text)]
PATTERNS = [text for text in QUOTED if re.fullmatch(r"[\w./<>-]+", text) and "/<" in text]
NAMES = [text for text in QUOTED if re.fullmatch(r"[A-Za-z_][\w.]*", text) and text not in FILES]
OF_A_RUN = ("final/", "manifest.json", "launch.json", "config.json")
"""Lie in a run folder or in the folder of a model."""


@cache
def sources() -> str:
    """All code of the package."""
    paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


@cache
def paths() -> tuple[str, ...]:
    """Files and folders of the package and of the tests, with slashes around them."""
    entries = [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]
    return tuple(f"/{path.relative_to(ROOT).as_posix()}/" for path in entries)


@pytest.mark.parametrize("text", [text for text in FILES + FOLDERS if text not in OF_A_RUN])
def test_a_path_that_the_page_names_exists(text: str) -> None:
    name = text.rstrip("/")
    if (ROOT / name).exists() or (PACKAGE / name).exists():
        return
    # A file without its folder is in the folder of the file named before it.
    assert any(path.endswith(f"/{name}/") for path in paths())


@pytest.mark.parametrize("text", PATTERNS)
def test_the_folder_of_a_pattern_exists(text: str) -> None:
    folder = text.partition("/<")[0]
    assert (ROOT / folder).is_dir() or (PACKAGE / folder).is_dir()


@pytest.mark.parametrize("text", NAMES)
def test_a_name_that_the_page_names_is_in_the_code(text: str) -> None:
    for name in text.split("."):
        assert re.search(rf"\b{name}\b", sources()), f"no {name} in src/headway"


def test_a_class_or_function_behind_a_file_is_in_that_file() -> None:
    places = re.findall(r"`([\w/]+\.py)` \(`(\w+)(?:\.(\w+))?`\)", TEXT)
    assert places
    for file, *names in places:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for name in filter(None, names):
            assert re.search(rf"\b{name}\b", source), f"{file} has no {name}"


def test_the_table_of_rooms_has_every_package() -> None:
    rooms = PAGE.partition("## Rooms")[2].partition("## Six walks")[0]
    named = re.findall(r"^\| `(\w+)` \|", rooms, re.MULTILINE)
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    modules = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert sorted(named) == sorted([*packages, *modules])


def test_the_page_can_be_read_in_ten_minutes() -> None:
    # 250 words a minute; bars of tables are no words.
    words = [word for word in PAGE.split() if re.search(r"\w", word)]
    assert len(words) < 2700
    assert CONTRACTS and RULES

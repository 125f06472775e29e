"""docs/read-the-code.md names files and places in them: all of them exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "read-the-code.md"
ROW = re.compile(r"^\| `([a-z0-9_/]+\.py)` \| ([^|]+) \|", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "places"), ROWS)
def test_a_place_that_the_reading_guide_names_is_in_its_file(file: str, places: str) -> None:
    source = (ROOT / "src" / "headway" / file).read_text(encoding="utf-8")
    for place in re.findall(r"`([^`]+)`", places):
        for name in place.split("."):
            assert re.search(rf"\b(def|class) {name}\b", source), f"{file} has no {place}"


def test_the_way_of_a_row_can_be_read_in_one_sitting() -> None:
    first_table = PAGE.read_text(encoding="utf-8").partition("### What surrounds a step")[0]
    files = [file for file, _ in ROW.findall(first_table)]
    lines = [len((ROOT / "src" / "headway" / file).read_text().splitlines()) for file in files]
    assert 15 <= len(files) <= 25
    assert sum(lines) < 6200

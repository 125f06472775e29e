"""The parity table of docs/support.md: every row is measured again, stays within rounding, and is on the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import stock_walk
from support.parity_table import family_configs, native_rows, page, wrapped_rows

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")
SUPPORT = Path(__file__).parents[2] / "docs/support.md"
BEGIN = "<!-- made by tests/distributed/test_parity_table.py: begin -->\n"
END = "<!-- parity end -->\n"


def listed() -> dict[str, list[str]]:
    """Name of a row of the page -> its cells."""
    text = SUPPORT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_native_family_is_on_the_page() -> None:
    assert listed().keys() >= family_configs().keys()


def test_no_row_of_the_page_has_a_difference_beyond_rounding() -> None:
    for name, cells in listed().items():
        numbers = [float(cell) for cell in cells if cell[0].isdigit()]
        assert max(numbers) <= 1e-4, name
        assert set(cells[-2:]) == {"same"}, name


@pytest.mark.drill
@pytest.mark.timeout(3600)
def test_every_row_is_measured_again() -> None:
    import transformers

    native = native_rows()
    known = {
        str(config["model_type"]) for configs in family_configs().values() for config in configs
    }
    usable = [kind for kind in stock_walk.usable() if kind not in known]
    wrapped = wrapped_rows(usable)
    sys.stdout.write("\n" + page(native, wrapped))
    for row in (*native, *wrapped):
        row.check()
    text = SUPPORT.read_text(encoding="utf-8").partition(BEGIN)[2]
    if f"transformers {transformers.__version__}," in text:
        assert {row.name for row in (*native, *wrapped)} == listed().keys()

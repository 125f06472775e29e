"""The tables of docs/cluster.md are what `headway plan` computes today."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_tables_are_current() -> None:
    spec = importlib.util.spec_from_file_location("cluster_tables", DOCS / "_cluster_tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (DOCS / "cluster.md").read_text(encoding="utf-8")
    assert text.count("<!-- plan: ") == len(tables.TABLES)
    assert tables.with_tables(text) == text, "run python docs/_cluster_tables.py"

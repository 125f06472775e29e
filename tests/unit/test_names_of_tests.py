"""A claim is proved in one place: no two files have a test of the same name."""

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_files_have_a_test_of_the_same_name() -> None:
    files: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                files[node.name].add(str(path.relative_to(TESTS)))
    twice = {name: sorted(places) for name, places in files.items() if len(places) > 1}
    assert not twice, "say in the name what differs, or prove the claim in one place"

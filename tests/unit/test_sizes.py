"""Modules stay readable: 400 lines at most, functions under 60, unless the file says at its top why it must be longer."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "Longer than 400 lines because" in text[:2000]:
        return
    assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines; split it or say why at its top"
    if "src" not in path.parts:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= 60, f"{path}:{node.lineno}: {node.name} has {lines} lines"


def test_the_loop_fits_on_one_screen_and_a_half() -> None:
    loop = ROOT / "src" / "headway" / "train" / "loop.py"
    assert loop.read_text(encoding="utf-8").count("\n") <= 150

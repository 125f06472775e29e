"""Modules stay readable: 400 lines at most, functions under 60, unless the file says at its top why it must be longer."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted({path.parent for top in ("src", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")})


def too_long(path: Path) -> Iterator[str]:
    """What of a file is too long."""
    text = path.read_text(encoding="utf-8")
    if "Longer than 400 lines because" in text[:2000]:
        return
    if text.count("\n") > 400:
        yield f"{path} has {text.count(chr(10))} lines; split it or say why at its top"
    if "src" not in path.parts:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > 60:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_are_short(folder: Path) -> None:
    assert not [what for path in sorted(folder.glob("*.py")) for what in too_long(path)]


def test_the_loop_fits_on_one_screen_and_a_half() -> None:
    loop = ROOT / "src" / "headway" / "train" / "loop.py"
    assert loop.read_text(encoding="utf-8").count("\n") <= 150

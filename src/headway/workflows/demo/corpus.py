"""The demo's corpus: the source of the Python standard library, one document per module, and questions from its docstrings."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from headway.errors import DataError
from headway.runtime.storage import write_atomic

SKIPPED_FOLDERS = {
    "test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings",
}  # fmt: skip
MAX_BYTES = 12_000_000


def library_files(root: Path | None = None) -> Iterator[Path]:
    """The standard library's modules, in a fixed order."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        if not SKIPPED_FOLDERS & set(inside[:-1]) and not any(
            "site-packages" in part for part in inside
        ):
            yield path


def write_corpus(out: Path, root: Path | None = None) -> tuple[int, int]:
    """Write one JSON line per module; returns their number and total bytes."""
    lines: list[str] = []
    total = 0
    for path in library_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < 200:
            continue
        total += len(text.encode())
        lines.append(json.dumps({"text": text, "module": path.stem}, ensure_ascii=False))
        if total >= MAX_BYTES:
            break
    if len(lines) < 50:
        raise DataError(
            f"only {len(lines)} modules of the standard library were found; the demo needs the library's source files."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines), total


def write_instructions(out: Path, root: Path | None = None) -> int:
    """Questions about the library's functions and classes, answered by the first sentence of their docstrings; returns their number."""
    lines: list[str] = []
    for path in library_files(root):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, SyntaxError):
            continue
        for kind, name, answer in _documented(tree, path.stem):
            turns = [
                {"role": "user", "content": f"What does the {kind} {name} do?"},
                {"role": "assistant", "content": answer},
            ]
            lines.append(json.dumps({"messages": turns}, ensure_ascii=False))
    if len(lines) < 100:
        raise DataError(
            f"only {len(lines)} docstrings were found in the standard library; the demo needs its source files."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines)


def _documented(tree: ast.Module, module: str) -> Iterator[tuple[str, str, str]]:
    """(function or class, dotted name, first sentence) of everything public with a docstring at the top of a module."""
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if 20 <= len(text) <= 300:
            yield (
                ("class" if isinstance(node, ast.ClassDef) else "function"),
                f"{module}.{node.name}",
                text,
            )

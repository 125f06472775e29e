"""The demo's corpus: the source of the Python standard library, one document per module, and
questions from its docstrings.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from headway.errors import DataError
from headway.runtime.storage import write_atomic

SKIPPED_FOLDERS = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "encodings",
}
"""Folders of tests, installed packages, bundled programs and generated tables."""
MAX_BYTES = 12_000_000
"""The corpus ends with the module that reaches this size."""
LEAST_CHARACTERS = 200
"""Shorter modules are left out."""
LEAST_MODULES = 50
"""With fewer modules than this, the library's source is not installed."""
LEAST_QUESTIONS = 100
"""With fewer questions than this, likewise."""
ANSWER_CHARACTERS = (20, 300)
"""The least and the most characters of an answer; docstrings outside of this give no question."""


def library_files(root: Path | None = None) -> Iterator[Path]:
    """The standard library's modules, in a fixed order."""
    folder = root or Path(sysconfig.get_paths()["stdlib"])
    # Sorted, because the order of rglob depends on the file system.
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        is_skipped = not SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1])
        # As a part of a name, too: it need not be the whole name of a folder.
        if not is_skipped and "site-packages" not in str(relative):
            yield path


def write_corpus(out: Path, root: Path | None = None) -> tuple[int, int]:
    """Write one JSON line per module; returns their number and the total bytes of their texts.

    `root` stands in for the folder of the standard library.
    """
    lines: list[str] = []
    total_bytes = 0
    for path in library_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) < LEAST_CHARACTERS:
            continue
        total_bytes += len(text.encode())
        lines.append(json.dumps({"text": text, "module": path.stem}, ensure_ascii=False))
        if total_bytes >= MAX_BYTES:
            break

    if len(lines) < LEAST_MODULES:
        raise DataError(
            f"only {len(lines)} modules of the standard library were found; the demo needs the "
            "library's source files."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines), total_bytes


def write_instructions(out: Path, root: Path | None = None) -> int:
    """Write questions about the library's functions and classes, one JSON line each, answered by
    the first paragraph of their docstrings; returns their number.
    """
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

    if len(lines) < LEAST_QUESTIONS:
        raise DataError(
            f"only {len(lines)} docstrings were found in the standard library; the demo needs its "
            "source files."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, "\n".join(lines) + "\n")
    return len(lines)


def _documented(tree: ast.Module, module: str) -> Iterator[tuple[str, str, str]]:
    """(function or class, dotted name, first paragraph) of public functions and classes at the top
    level of a module, where the paragraph has the length of an answer.

    `module` is the stem of the file: names of a package's own file begin with `__init__.`.
    """
    least, most = ANSWER_CHARACTERS
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        first_paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
        answer = " ".join(first_paragraph.split())
        if least <= len(answer) <= most:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            yield kind, f"{module}.{node.name}", answer

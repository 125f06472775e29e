"""Imports point one way: a package imports only itself and the packages above it in ARCHITECTURE.md. Lazy imports count."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "headway"
ORDER = [
    "errors", "config", "runtime", "text", "media", "tokenizer", "store", "records", "rewards", "data", "prepare", "kernels", "model", "tasks",
    "objective", "optim", "parallel", "checkpoint", "infer", "rollout", "eval", "export", "track", "plan", "diagnose", "train", "launch", "serve",
    "board", "workflows", "api", "plugin", "cli",
]  # fmt: skip


def imported_packages(path: Path) -> list[tuple[str, int]]:
    imports: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            base = node.module or ""
            names = [f"headway.{a.name}" for a in node.names] if base == "headway" else [base]
        imports += [(n.split(".")[1], node.lineno) for n in names if n.startswith("headway.")]
    return imports


@pytest.mark.parametrize(
    "package",
    sorted(
        {p.relative_to(SRC).parts[0] for p in SRC.rglob("*.py")} - {"__init__.py", "__main__.py"}
    ),
)
def test_imports_only_point_up(package: str) -> None:
    folder = SRC / package
    name = package.removesuffix(".py")
    assert name in ORDER, f"{name} has no place in the order of packages"
    below = {other for other in ORDER if ORDER.index(other) > ORDER.index(name)}
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
        wrong = [(other, line) for other, line in imported_packages(path) if other in below]
        assert not wrong, f"{path}: {name} may not import {wrong}"
        unknown = [
            other
            for other, _ in imported_packages(path)
            if other not in ORDER and not other.startswith("__")
        ]
        assert not unknown, f"{path}: {unknown} have no place in the order of packages"


def test_the_architecture_lists_the_packages_in_this_order() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rooms = page.partition("## Rooms")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)` \|", rooms) == ORDER


def test_nothing_is_called_utils() -> None:
    banned = {"utils", "helpers", "common", "misc"}
    assert not [
        p for p in SRC.rglob("*.py") if p.stem in banned or banned & set(p.relative_to(SRC).parts)
    ]


def test_no_two_public_classes_share_a_name() -> None:
    files: dict[str, list[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and node.name not in ("Config", "Kind")
            ):  # of the modules of kinds
                files.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    assert not {name: where for name, where in files.items() if len(where) > 1}


SHARED_BY_TASKS = {"base", "answers", "balance"}
"""Modules of `tasks` that belong to no single task."""
SINGLE_TASKS = {
    "train/config.py": {"next_token"},  # what a recipe without an objective trains
    "infer/engine/part.py": {"next_token"},  # an engine that trains nothing needs some loss
    "diagnose/equality.py": {"next_token"},  # the loss that the check compares
    "eval/retrieval.py": {"contrastive"},  # ranks of partners, the same as in training
}
"""Modules outside `tasks` that may import a single task, and which. None asks which task a run has."""


def test_a_task_is_asked_never_recognised() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        if name.startswith(("tasks/", "objective/")):
            continue
        text = path.read_text(encoding="utf-8")
        tasks = set(re.findall(r"(?m)^ *(?:from|import) headway\.tasks\.(\w+)", text))
        tasks -= SHARED_BY_TASKS
        if tasks:
            found[name] = tasks
    assert found == SINGLE_TASKS

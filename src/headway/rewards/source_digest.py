"""What a user's code is made of: a file or module comes in, a digest of its source and of all that
it imports goes out.

    modules beside it, or on Python's path    their source, and what they import
    installed packages                        their versions
    Python's library                          the version of Python

Imports are read, never run. What code opens or imports by a computed name is not seen.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import headway
from headway.config.regular_file import regular_only
from headway.rewards.base import digest_of

MOST_FILES = 5000
"""Of a package that is no installed one; a larger one is not somebody's own code."""
LARGEST_BYTES = 10 << 20


def code_digest(path: Path) -> str:
    """The digest of a module with everything that it imports."""
    seen = _Sources()
    seen.read_file(path)
    # A part of a package imports others by relative names, and its `__init__` runs first.
    package = _package_of(path)
    if package is not None:
        seen.read_folder(package)
    return digest_of(
        {
            "python": sys.version_info[:3],
            "headway": headway.__version__,
            "files": sorted(seen.files.items()),
            "packages": sorted(seen.packages.items()),
        }
    )


def _package_of(path: Path) -> Path | None:
    """The folder of the topmost package that a file is in."""
    package = None
    folder = path.resolve().parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        package = folder
        folder = folder.parent
    return package


class _Sources:
    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        """Digests of source files, by path."""
        self.packages: dict[str, str] = {}
        """Versions of installed packages."""
        self._names: set[str] = set()

    def read_file(self, path: Path) -> None:
        """A file, and what it imports."""
        key = str(path.resolve())
        if key in self.files or len(self.files) >= MOST_FILES:
            return
        # A named pipe in the folder would wait for ever.
        with open(path, "rb", opener=regular_only) as file:
            source = file.read(LARGEST_BYTES)
        # Noted before its imports are read: two files may import each other.
        self.files[key] = digest_of(source.hex())
        if path.suffix != ".py":
            return
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # importing it fails with a better message
        for name in sorted(set(_imported(tree))):
            self.read_module(name)

    def read_module(self, name: str) -> None:
        """A top-level module or package, by its name."""
        if name in self._names or name in sys.stdlib_module_names or name == "headway":
            return
        self._names.add(name)
        distributions = _distributions().get(name)
        if distributions:
            for distribution in distributions:
                try:
                    self.packages[distribution] = version(distribution)
                except PackageNotFoundError:
                    self.packages[distribution] = "unknown"
            return
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            # Imports in `try` may name what is not there; installing it changes the digest.
            self.packages[name] = "missing"
            return
        for folder in spec.submodule_search_locations or ():
            self.read_folder(Path(folder))
        if spec.origin is not None and Path(spec.origin).is_file():
            self.read_file(Path(spec.origin))

    def read_folder(self, folder: Path) -> None:
        """All modules of a package."""
        for path in sorted(folder.rglob("*.py")):
            try:
                self.read_file(path)
            except OSError:
                continue  # a link that leads nowhere is not imported either


@cache
def _distributions() -> dict[str, list[str]]:
    return {name: sorted(set(values)) for name, values in packages_distributions().items()}


def _imported(tree: ast.AST) -> Iterator[str]:
    """The first parts of all names that are imported, also inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.partition(".")[0]

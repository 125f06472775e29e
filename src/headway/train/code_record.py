"""Which code outside headway a run uses: a recipe comes in; code.json and copies of the files go into the run folder.

code.json                         key, name, file and SHA-256 of every module the recipe names, at the newest start
logs/starts/0001/code/            copies of the files, as they were at that start
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.config.load import find_external_code
from headway.config.user_code import user_code_file
from headway.runtime.json_file import load_json, read_bounded
from headway.runtime.storage import write_atomic
from headway.train.config import Recipe

log = logging.getLogger("headway")

CODE = "code.json"


@dataclass(frozen=True)
class CodeFile:
    """One file of code that a recipe names."""

    key: str
    """The setting that names it."""
    name: str
    """As the recipe names it: a dotted name or a path."""
    file: str | None
    sha256: str | None


def find_code(recipe: Recipe) -> list[CodeFile]:
    """The code a recipe names; it is imported already."""
    found: list[CodeFile] = []
    for one in find_external_code(
        recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    ):
        if one.module is not None:
            content = _read(path := user_code_file(one.module))
            digest = None if content is None else hashlib.sha256(content).hexdigest()
            found.append(CodeFile(one.key, one.module, None if path is None else str(path), digest))
    return found


def record_code(folder: Path, recipe: Recipe) -> None:
    """Write code.json and copies of the files into the run folder; warn where the code has changed since the last start."""
    code = find_code(recipe)
    if not code and not (folder / CODE).exists():
        return
    before = _recorded(folder)
    for one in code:
        if one.key in before and before[one.key] != one.sha256:
            log.warning(
                "%s: the code of %s has changed since the last start of this run", one.key, one.name
            )
    write_atomic(
        folder / CODE,
        json.dumps([asdict(one) for one in code], indent=2, ensure_ascii=False) + "\n",
    )
    starts = sorted((folder / "logs" / "starts").glob("[0-9]*"))
    for one in code if starts else ():
        if one.file is not None and (content := _read(Path(one.file))) is not None:
            target = starts[-1] / "code" / f"{one.key}-{Path(one.file).name}"
            target.parent.mkdir(exist_ok=True)
            write_atomic(target, content)


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else read_bounded(path)
    except OSError:
        return None


def _recorded(folder: Path) -> dict[str, str | None]:
    """The hash of each key at the last start."""
    try:
        found: Any = load_json(folder / CODE)
        return {one["key"]: one["sha256"] for one in found}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}

"""Which code outside headway a run uses: a recipe comes in; code.json and copies of the files go
into the run folder.

    code.json                 key, name, file and SHA-256 of every module at the newest start
    logs/starts/0001/code/    copies of the files, as they were at that start
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.config.external_code import find_external_code
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
    files: list[CodeFile] = []
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for code in find_external_code(settings):
        if code.module is None:
            continue
        path = user_code_file(code.module)
        content = _read(path)
        digest = None
        if content is not None:
            digest = hashlib.sha256(content).hexdigest()
        file = None if path is None else str(path)
        files.append(CodeFile(code.key, code.module, file, digest))
    return files


def record_code(folder: Path, recipe: Recipe) -> None:
    """Write code.json and copies of the files into the run folder.

    Warn where the code has changed since the last start.
    """
    code = find_code(recipe)
    # A recipe that names no code any more still replaces the record of the start before.
    if not code and not (folder / CODE).exists():
        return
    recorded = _recorded_hashes(folder)
    for code_file in code:
        if code_file.key in recorded and recorded[code_file.key] != code_file.sha256:
            log.warning(
                "%s: the code of %s has changed since the last start of this run",
                code_file.key,
                code_file.name,
            )
    write_atomic(
        folder / CODE,
        json.dumps([asdict(code_file) for code_file in code], indent=2, ensure_ascii=False) + "\n",
    )

    starts = sorted((folder / "logs" / "starts").glob("[0-9]*"))
    if not starts:
        return
    for code_file in code:
        if code_file.file is None:
            continue
        content = _read(Path(code_file.file))
        if content is not None:
            target = starts[-1] / "code" / f"{code_file.key}-{Path(code_file.file).name}"
            target.parent.mkdir(exist_ok=True)
            write_atomic(target, content)


def _read(path: Path | None) -> bytes | None:
    """A file's content.

    None where it has none or cannot be read: code is recorded, not required.
    """
    if path is None:
        return None
    try:
        return read_bounded(path)
    except OSError:
        return None


def _recorded_hashes(folder: Path) -> dict[str, str | None]:
    """The hash of each key at the last start."""
    try:
        entries: Any = load_json(folder / CODE)
        return {entry["key"]: entry["sha256"] for entry in entries}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}

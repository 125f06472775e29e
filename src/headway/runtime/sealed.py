"""Small files that know their own checksum: what was changed on the disk since it was written reads as nothing.

bytes   headway-sealed <sha256 of the rest>\n<content>
JSON    {"checksum": "<sha256 of the other keys>", ...}
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.runtime.storage import TEMPORARY_PREFIX, write_atomic

HEAD = b"headway-sealed "
HEAD_BYTES = len(HEAD) + 64 + 1


def write_sealed(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write bytes with their checksum, whole or not at all; `durable` waits for the disk."""
    whole = HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n" + content
    if durable:
        write_atomic(path, whole)
        return
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}")
    temporary.write_bytes(whole)
    os.replace(temporary, path)


def read_sealed(path: Path) -> bytes | None:
    """The bytes that were written; None where there is no such file. Any change since is a ValueError."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    content = whole[HEAD_BYTES:]
    if whole[:HEAD_BYTES] != HEAD + hashlib.sha256(content).hexdigest().encode() + b"\n":
        raise ValueError("its checksum does not match")
    return content


def sealed_json(values: Mapping[str, Any]) -> str:
    """JSON text of some values with their checksum."""
    return json.dumps({"checksum": _checksum(values), **values}, indent=1) + "\n"


def parse_sealed_json(text: str | bytes) -> dict[str, Any]:
    """The values of sealed JSON; any change since is a ValueError."""
    given: Any = json.loads(text)
    if not isinstance(given, dict) or given.pop("checksum", None) != _checksum(given):
        raise ValueError("its checksum does not match")
    return given


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

"""What many checkpoints say about themselves, cheaply: step, validation and files, without their thousands of boxes.

A manifest's checksum is checked, and the sizes of its files; what was read once is not read again while the manifest is the same file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.manifest import MANIFEST, Head, read_head
from headway.errors import CheckpointError

THOROUGH = 4
"""Of the newest checkpoints, how many are checked for coverage too before they count as whole."""


class Heads:
    """Remembers the heads of the checkpoints in a folder."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], Head]] = {}

    def of(self, paths: Sequence[Path]) -> list[Head | None]:
        """The heads of checkpoints, the newest last; None for one that is not whole. The bytes of tensors are not read."""
        found = [self._head(path, thorough=place >= len(paths) - THOROUGH) for place, path in enumerate(paths)]
        known = self._known
        self._known = {path: known[path] for path in paths if path in known}
        return found

    def _head(self, path: Path, *, thorough: bool) -> Head | None:
        try:
            status = os.stat(path / MANIFEST)
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._known.get(path)
            if known is None or known[0] != mark:
                if thorough:
                    open_checkpoint(path).verify(deep=False)
                known = self._known[path] = (mark, read_head(path))
            whole = all(os.stat(path / file.path).st_size == file.size for file in known[1].files)
        except (OSError, CheckpointError):
            return None
        return known[1] if whole else None

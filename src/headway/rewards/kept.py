"""Rewards that were computed before: none is asked twice, also after a kill.

    FOLDER/kept-<hex>.jsonl    a line each: crc32 of the JSON, a space, {"key": ..., "value": ...}

A panel reads all files of the folder and appends to one of its own, so that ranks may share a
folder. A line that a kill cut, or that changed on the disk, is left out. Failures are not kept.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from headway.config.regular_file import regular_only
from headway.rewards.base import RewardOutcome
from headway.runtime.json_file import read_bounded
from headway.runtime.storage import fsync_file, fsync_folder, writing

LARGEST_BYTES = 8 << 30
"""Of a file that is read as a whole."""


class KeptRewards:
    """Outcomes by key, in memory and in a folder; None: in memory alone."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._outcomes: dict[str, RewardOutcome] = {}
        self._file: BinaryIO | None = None
        if folder is None:
            return
        # A name that no other process has: two writers of one file could mix their lines.
        self._path = folder / f"kept-{uuid.uuid4().hex[:16]}.jsonl"
        for path in sorted(folder.glob("kept-*.jsonl")):
            self._read(path)

    def __len__(self) -> int:
        return len(self._outcomes)

    def get(self, key: str) -> RewardOutcome | None:
        """The outcome of a key; None if it is not kept."""
        return self._outcomes.get(key)

    def add(self, outcomes: Mapping[str, RewardOutcome]) -> None:
        """Keep the outcomes that are no failures; they are on the disk when this returns."""
        lines = bytearray()
        for key, outcome in outcomes.items():
            if outcome.value is None or key in self._outcomes:
                continue
            self._outcomes[key] = outcome
            line: dict[str, Any] = {"key": key, "value": outcome.value}
            if outcome.details:
                line["details"] = outcome.details
            body = json.dumps(line).encode()
            lines += b"%08x %s\n" % (zlib.crc32(body), body)
        if self.folder is None or not lines:
            return

        with writing(self._path, len(lines)):
            # Only now: a run whose rewards are all kept already leaves no empty file.
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "ab", opener=regular_only)  # noqa: SIM115
                fsync_folder(self.folder)
            self._file.write(lines)
            self._file.flush()
            fsync_file(self._file.fileno())

    def _read(self, path: Path) -> None:
        try:
            content = read_bounded(path, LARGEST_BYTES)
        except OSError:
            return  # what cannot be read is computed again
        for line in content.split(b"\n"):
            checksum, _, body = line.partition(b" ")
            # The last line of a process that was killed may be cut.
            if checksum != b"%08x" % zlib.crc32(body):
                continue
            try:
                values = json.loads(body)
                outcome = RewardOutcome(float(values["value"]), None, values.get("details", {}))
                self._outcomes[str(values["key"])] = outcome
            except (ValueError, KeyError, TypeError):
                continue

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

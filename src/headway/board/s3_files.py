"""Files of runs in S3, through `runtime.s3`: one listing every few seconds, and ranges of what has
grown.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import PurePosixPath

from headway.board.mirror import RemoteError, RemoteFile, RemoteRun, is_run
from headway.board.remote_reader import is_kind
from headway.errors import HeadwayError
from headway.runtime.paths import S3Path
from headway.runtime.s3 import S3

RETRY_SECONDS = 5.0
"""Shorter than usual: the next listing tries again anyway."""
STEP = re.compile(r"(?:checkpoints/)?(step-\d{8,})/(.+)")
"""A file of a checkpoint, relative to its run."""


class S3Runs:
    """The runs below a prefix, as `RemoteFiles`."""

    poll_seconds = 3.0

    def __init__(self, location: S3Path) -> None:
        self.location = location
        self.store = S3(location.endpoint, retry_seconds=RETRY_SECONDS)

    def listing(self) -> tuple[float, dict[str, RemoteRun]]:
        """Every run whose objects are below the prefix."""
        try:
            objects = self.store.objects(self.location)
        except HeadwayError as problem:
            raise RemoteError(str(problem)) from None

        # S3 has no folders. Candidates are the parents of these two files; `is_run` decides.
        paths_of: dict[str, set[str]] = {}
        for key in objects:
            path = PurePosixPath(key)
            if path.name in ("metrics.jsonl", "recipe.yaml"):
                paths_of.setdefault(_name(path.parent), set())

        runs = {run: RemoteRun({}) for run in paths_of}
        checkpoints: dict[str, dict[str, _Checkpoint]] = {run: {} for run in paths_of}
        for key, (size, changed) in objects.items():
            # The innermost one: a stage is a run inside a run.
            parents = map(_name, PurePosixPath(key).parents)
            run = next((parent for parent in parents if parent in runs), None)
            if run is None:
                continue

            path = key[len(run) :].lstrip("/")
            paths_of[run].add(path)
            if match := STEP.fullmatch(path):
                name, file = match.groups()
                checkpoint = checkpoints[run].setdefault(name, _Checkpoint(name))
                checkpoint.size += size
                checkpoint.changed = max(checkpoint.changed, changed)
                checkpoint.is_complete |= file == "manifest.json"
            elif is_kind(path):
                runs[run].files[path] = RemoteFile(size, int(changed * 1e9))

        for run, by_name in checkpoints.items():
            # Links do not exist in S3.
            runs[run].checkpoints = [
                [entry.name, entry.size, entry.changed, entry.is_complete, []]
                for entry in by_name.values()
            ]

        return time.time(), {run: listed for run, listed in runs.items() if is_run(paths_of[run])}

    def read(self, run: str, path: str, offset: int, size: int) -> bytes:
        """A range of an object."""
        location = self.location
        if run:
            location = location / run
        try:
            return self.store.read_range(location / path, offset, size)
        except HeadwayError as problem:
            raise RemoteError(str(problem)) from None

    def close(self) -> None:
        """Give up what is being retried."""
        self.store.hurry(on=True)


@dataclass
class _Checkpoint:
    """What is known of a checkpoint, added up over its objects."""

    name: str
    size: int = 0
    changed: float = 0.0
    is_complete: bool = False


def _name(parent: PurePosixPath) -> str:
    """The name of a run by its folder; the prefix itself has none."""
    if str(parent) == ".":
        return ""
    return str(parent)

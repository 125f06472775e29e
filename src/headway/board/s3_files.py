"""Files of runs in S3, through `runtime.s3`: one listing every few seconds, and ranges of what has grown."""

from __future__ import annotations

import re
import time
from pathlib import PurePosixPath

from headway.board.mirror import RemoteError, RemoteFile, RemoteRun, is_run
from headway.board.remote_reader import is_kind
from headway.errors import HeadwayError
from headway.runtime.paths import S3Path
from headway.runtime.s3 import S3

RETRY_SECONDS = 5.0
STEP = re.compile(r"(?:checkpoints/)?(step-\d{8,})/(.+)")


class S3Runs:
    """The runs below a prefix."""

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
        names: dict[str, set[str]] = {}
        for key in objects:
            path = PurePosixPath(key)
            if path.name in ("metrics.jsonl", "recipe.yaml"):
                names.setdefault("" if str(path.parent) == "." else str(path.parent), set())
        runs: dict[str, RemoteRun] = {run: RemoteRun({}) for run in names}
        saved: dict[str, dict[str, list[object]]] = {run: {} for run in names}
        for key, (size, changed) in objects.items():
            run = next(
                (
                    str(parent) if str(parent) != "." else ""
                    for parent in PurePosixPath(key).parents
                    if _name(parent) in runs
                ),
                None,
            )
            if run is None:
                continue
            path = key[len(run) :].lstrip("/")
            names[run].add(path)
            if found := STEP.fullmatch(path):
                entry = saved[run].setdefault(found[1], [found[1], 0, 0.0, False, []])
                entry[1] = int(str(entry[1])) + size
                entry[2] = max(float(str(entry[2])), changed)
                entry[3] = bool(entry[3]) or found[2] == "manifest.json"
            elif is_kind(path):
                runs[run].files[path] = RemoteFile(size, int(changed * 1e9))
        for run, entries in saved.items():
            runs[run].checkpoints = list(entries.values())
        return time.time(), {run: found for run, found in runs.items() if is_run(names[run])}

    def read(self, run: str, path: str, offset: int, size: int) -> bytes:
        """A range of an object."""
        try:
            return self.store.read_range(
                self.location / run / path if run else self.location / path, offset, size
            )
        except HeadwayError as problem:
            raise RemoteError(str(problem)) from None

    def close(self) -> None:
        """Give up what is being retried."""
        self.store.hurry(on=True)


def _name(parent: PurePosixPath) -> str:
    return "" if str(parent) == "." else str(parent)

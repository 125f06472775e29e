"""The log files of SLURM jobs as one stream of lines, each with its origin in front.

logs/slurm-JOB.out         what the first process of the job prints    [job 12]
logs/slurm-JOB.HOST.0.log  what the launcher of a node prints          [gpu03], or [host 0] where several nodes are on one host
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headway.config.regular_file import regular_only
from headway.launch.targets.driven import tail

POLL_SECONDS = 1.0
STATUS_EVERY = 5
"""Polls between two questions to the controller, which serves a whole cluster."""


def log_files(folder: Path, jobs: Sequence[str]) -> dict[Path, str]:
    """The files of jobs that exist now, each with its prefix."""
    found: dict[Path, str] = {}
    for job in jobs:
        own = folder / f"slurm-{job}.out"
        if own.exists():
            found[own] = f"[job {job}]"
        files = sorted(folder.glob(f"slurm-{job}.*.*.log"))
        names = [
            path.name.removeprefix(f"slurm-{job}.").removesuffix(".log").rpartition(".")
            for path in files
        ]
        for path, (host, _, index) in zip(files, names, strict=True):
            shares_host = len([name for name, _, _ in names if name == host]) > 1
            words = [*([job] if len(jobs) > 1 else []), host, *([index] if shares_host else [])]
            found[path] = f"[{' '.join(words)}]"
    return found


def last_lines(
    folder: Path, jobs: Sequence[str], lines: int, positions: dict[Path, int]
) -> Iterator[str]:
    """The last lines of each file; where they end goes into `positions`."""
    for path, prefix in log_files(folder, jobs).items():
        positions[path] = path.stat().st_size
        for line in tail(path, lines, positions[path]):
            yield f"{prefix} {line}"


def follow_files(
    folder: Path, jobs: Sequence[str], positions: dict[Path, int], is_over: Callable[[], bool]
) -> Iterator[str]:
    """Every new line until the jobs have ended, of files that begin later too."""
    polls, over = 0, False
    while True:
        over = (
            polls % STATUS_EVERY == 0 and is_over()
        )  # before the read: what was written until the end is read
        for path, prefix in log_files(folder, jobs).items():
            for line in _new_lines(path, positions, whole=not over):
                yield f"{prefix} {line}"
        if over:
            return
        polls += 1
        time.sleep(POLL_SECONDS)


def _new_lines(path: Path, positions: dict[Path, int], *, whole: bool) -> list[str]:
    """Lines since the last call; an unfinished one waits for its rest."""
    with open(path, "rb", opener=regular_only) as file:
        file.seek(positions.get(path, 0))
        data = file.read()
    end = data.rfind(b"\n") + 1 if whole else len(data)
    positions[path] = positions.get(path, 0) + end
    return data[:end].decode(errors="replace").splitlines()

"""The log files of SLURM jobs as one stream of lines, each with its origin in front.

logs/slurm-JOB.out         what the first process of the job prints    [job 12]
logs/slurm-JOB.HOST.0.log  what the launcher of a node prints          [gpu03], or [host 0]
                                                 where several nodes are on one host
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headway.config.regular_file import regular_only
from headway.launch.targets.driven import tail

POLL_SECONDS = 1.0
STATUS_EVERY = 5
"""Polls between two questions to the controller, which serves a whole cluster."""


def log_files(folder: Path, jobs: Sequence[str]) -> dict[Path, str]:
    """The files of jobs that exist now, each with its prefix."""
    prefixes: dict[Path, str] = {}
    for job in jobs:
        job_log = folder / f"slurm-{job}.out"
        if job_log.exists():
            prefixes[job_log] = f"[job {job}]"

        # A host name may have dots: the index is after the last one.
        origins: dict[Path, tuple[str, str]] = {}
        for path in sorted(folder.glob(f"slurm-{job}.*.*.log")):
            name = path.name.removeprefix(f"slurm-{job}.").removesuffix(".log")
            host, _, index = name.rpartition(".")
            origins[path] = (host, index)
        files_of_host = Counter(host for host, _ in origins.values())

        for path, (host, index) in origins.items():
            words = [host]
            if len(jobs) > 1:
                words.insert(0, job)
            if files_of_host[host] > 1:
                words.append(index)
            prefixes[path] = f"[{' '.join(words)}]"
    return prefixes


def last_lines(
    folder: Path, jobs: Sequence[str], lines: int, positions: dict[Path, int]
) -> Iterator[str]:
    """The last lines of each file; where they end goes into `positions`."""
    # The size is taken once: what is written after it belongs to `follow_files`.
    for path, prefix in log_files(folder, jobs).items():
        positions[path] = path.stat().st_size
        for line in tail(path, lines, positions[path]):
            yield f"{prefix} {line}"


def follow_files(
    folder: Path, jobs: Sequence[str], positions: dict[Path, int], is_over: Callable[[], bool]
) -> Iterator[str]:
    """Every new line until the jobs have ended, of files that begin later too."""
    polls = 0
    while True:
        # Asked before the read, so that what was written until the end is read.
        over = polls % STATUS_EVERY == 0 and is_over()
        for path, prefix in log_files(folder, jobs).items():
            for line in _new_lines(path, positions, whole=not over):
                yield f"{prefix} {line}"
        if over:
            return
        polls += 1
        time.sleep(POLL_SECONDS)


def _new_lines(path: Path, positions: dict[Path, int], *, whole: bool) -> list[str]:
    """Lines since the last call; with `whole`, an unfinished one waits for its rest."""
    # A file that has begun since the last call is read from its beginning.
    with open(path, "rb", opener=regular_only) as file:
        file.seek(positions.get(path, 0))
        data = file.read()
    end = len(data)
    if whole:
        end = data.rfind(b"\n") + 1
    positions[path] = positions.get(path, 0) + end
    return data[:end].decode(errors="replace").splitlines()

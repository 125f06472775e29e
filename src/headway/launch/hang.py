"""Ranks that make no progress: found by their heartbeats, and recorded with their stacks before they are killed.

In: the heartbeats in a run folder. Out: which ranks of this machine hang; logs/hang-*.json and logs/stacks-rank-*.txt.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from headway.runtime.deferred import Deferred
from headway.runtime.heartbeat import STACK_SIGNAL, Beat, is_alive, stacks_file, suspects

MAX_CHECK_SECONDS = 5.0
"""The most that one check adds to the time without progress, however long ago the last check was."""
STACK_SECONDS = 3.0
POLL_SECONDS = 0.1


class HangDetector:
    """How long the ranks of this machine have made no progress, measured by changes in their heartbeats, not by clocks.

    Only checked time counts: after a pause of the whole machine, ranks first get the chance to continue.
    """

    def __init__(self, hang_seconds: float, stale: Sequence[Beat] = ()) -> None:
        self.hang_seconds = hang_seconds
        self._stale = {(beat.rank, beat.pid, beat.at) for beat in stale}
        """Heartbeats of an earlier start."""
        self._idle: dict[int, tuple[object, float]] = {}
        self._checked_at: float | None = None

    def hung(self, beats: Sequence[Beat], *, counts: bool = True) -> list[Beat]:
        """The ranks of this machine, if one of them has made no progress for too long; other machines have their own supervisor.

        While the disk cannot be written (`counts` is false), heartbeats stop too and mean nothing.
        """
        now = time.monotonic()
        passed = (
            min(now - self._checked_at, MAX_CHECK_SECONDS)
            if self._checked_at is not None and counts
            else 0.0
        )
        self._checked_at = now
        here = [
            beat
            for beat in beats
            if beat.host == socket.gethostname()
            and (beat.rank, beat.pid, beat.at) not in self._stale
        ]
        for beat in here:
            mark = (beat.pid, beat.step, beat.phase, beat.progress_at)
            before, idle = self._idle.get(beat.rank, (None, 0.0))
            self._idle[beat.rank] = (mark, idle + passed if mark == before else 0.0)
        return (
            here
            if any(self._idle[beat.rank][1] > self.hang_seconds and is_alive(beat) for beat in here)
            else []
        )


def record_hang(run_dir: Path, beats: Sequence[Beat], writes: Deferred) -> str:
    """Write where every rank is and what it does; returns it as one line."""
    now = time.time()
    states = [beat.describe(now) for beat in beats]
    written = _record_stacks(run_dir, beats)
    blame = suspects(list(beats), now)
    report = {"at": now, "ranks": states, "suspects": blame, "stacks": written}
    writes.replace(run_dir / "logs" / f"hang-{int(now)}.json", json.dumps(report, indent=2) + "\n")
    return "; ".join(states) + (f". {blame}" if blame else "")


def _record_stacks(run_dir: Path, beats: Sequence[Beat]) -> list[str]:
    """Make every rank write its stacks and wait a moment; a process stopped by the kernel cannot."""
    files = {beat.rank: stacks_file(run_dir, beat.rank) for beat in beats}
    before = {rank: _size(path) for rank, path in files.items()}
    for beat in beats:
        send_signal(beat.pid, STACK_SIGNAL)
    until = time.monotonic() + STACK_SECONDS
    while time.monotonic() < until and any(
        _size(path) == before[rank] for rank, path in files.items()
    ):
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # for the last lines
    return [str(path) for rank, path in files.items() if _size(path) > before[rank]]


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0

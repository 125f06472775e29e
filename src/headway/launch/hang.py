"""Ranks that make no progress: found by their heartbeats, and recorded with their stacks before
they are killed.

In: the heartbeats in a run folder. Out: which ranks of this machine hang; logs/hang-*.json and
logs/stacks-rank-*.txt.
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
"""The most that one check adds to the time without progress, however long ago the last check was.
"""
STACK_SECONDS = 3.0
"""How long ranks may take to write their stacks."""
POLL_SECONDS = 0.1


class HangDetector:
    """How long the ranks of this machine have made no progress, measured by changes in their
    heartbeats, not by clocks.

    Only checked time counts: after a pause of the whole machine, ranks first get the chance to
    continue.
    """

    def __init__(self, hang_seconds: float, stale: Sequence[Beat] = ()) -> None:
        self.hang_seconds = hang_seconds
        self._stale = {(beat.rank, beat.pid, beat.at) for beat in stale}
        """Heartbeats of an earlier start."""
        self._idle: dict[int, tuple[object, float]] = {}
        """By rank: the state it was last seen in, and the checked seconds since it changed."""
        self._checked_at: float | None = None

    def hung(self, beats: Sequence[Beat], *, counts: bool = True) -> list[Beat]:
        """The ranks of this machine, if one of them has made no progress for too long.

        Other machines have their own supervisor.

        While the disk cannot be written (`counts` is false), heartbeats stop too and mean nothing.
        """
        # A check that comes late, after a pause of the machine, counts for a few seconds only.
        now = time.monotonic()
        passed = 0.0
        if self._checked_at is not None and counts:
            passed = min(now - self._checked_at, MAX_CHECK_SECONDS)
        self._checked_at = now

        host = socket.gethostname()
        local_beats = [
            beat
            for beat in beats
            if beat.host == host and (beat.rank, beat.pid, beat.at) not in self._stale
        ]
        is_hung = False
        for beat in local_beats:
            # Not `beat.at`: the thread that writes heartbeats runs on while training hangs.
            progress = (beat.pid, beat.step, beat.phase, beat.progress_at)
            last_progress, idle_seconds = self._idle.get(beat.rank, (None, 0.0))
            idle_seconds = idle_seconds + passed if progress == last_progress else 0.0
            self._idle[beat.rank] = (progress, idle_seconds)
            # A rank that has ended leaves its last heartbeat; that is for its launcher to see.
            if idle_seconds > self.hang_seconds and is_alive(beat):
                is_hung = True
        return local_beats if is_hung else []


def record_hang(run_dir: Path, beats: Sequence[Beat], writes: Deferred) -> str:
    """Write where every rank is and what it does; returns it as one line."""
    now = time.time()
    states = [beat.describe(now) for beat in beats]
    stack_files = _record_stacks(run_dir, beats)
    blame = suspects(list(beats), now)
    report = {"at": now, "ranks": states, "suspects": blame, "stacks": stack_files}
    writes.replace(run_dir / "logs" / f"hang-{int(now)}.json", json.dumps(report, indent=2) + "\n")

    text = "; ".join(states)
    if blame:
        text += f". {blame}"
    return text


def _record_stacks(run_dir: Path, beats: Sequence[Beat]) -> list[str]:
    """Make every rank write its stacks and wait a moment; returns the files that have grown.

    A process that the kernel has stopped writes none.
    """
    paths = [stacks_file(run_dir, beat.rank) for beat in beats]
    sizes_before = {path: _size(path) for path in paths}
    for beat in beats:
        send_signal(beat.pid, STACK_SIGNAL)

    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline:
        if all(_size(path) != sizes_before[path] for path in paths):
            break
        time.sleep(POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # a file that has grown may not be complete
    return [str(path) for path in paths if _size(path) > sizes_before[path]]


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _size(path: Path) -> int:
    if path.exists():
        return path.stat().st_size
    return 0

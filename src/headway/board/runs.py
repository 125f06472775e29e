"""Folders come in; the runs below them go out, each with its state and its newest numbers. Nothing
is ever written there.

State of a run, from its heartbeats, its events and its summary:

    live       a rank is running              stalled    it runs, but makes no progress
    done       it has a summary.json          stopped    it was stopped, and can be resumed
    failed     it crashed, or its process is gone without a word
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from headway.board.follow import last_lines
from headway.board.remote_reader import MAX_DEPTH, MAX_FOLDERS, MAX_RUNS, SKIPPED
from headway.config.yaml_reader import parse_yaml
from headway.errors import HeadwayError
from headway.runtime.heartbeat import Beat, is_alive, read_beats
from headway.runtime.json_file import load_json, read_bounded
from headway.track.events import EVENTS
from headway.train.control import is_supervised
from headway.train.run_folder import METRICS, RECIPE, SUMMARY
from headway.train.stages import FOLDER as STAGES

State = Literal["live", "stalled", "done", "stopped", "failed"]
STALL_SECONDS = 120.0
STALL_STEPS = 20
"""A running rank that makes no progress for STALL_SECONDS, or for so many of its steps where they
are long, is stalled.
"""
BEAT_SECONDS = 15.0
"""A heartbeat elsewhere that is older belongs to a process that is gone."""
FRESH_SECONDS = 60.0
"""A run elsewhere without heartbeats is live if its metrics changed within this time."""
SUMMARY_BYTES = 4 << 20
RECIPE_BYTES = 512 << 10
EVENT_TAIL_BYTES = 64 << 10
"""The end of events.jsonl, which has the newest of them."""
CAUSE_CHARACTERS = 400
LONGEST_ETA_SECONDS = 1e12
"""A longer estimate is no number of seconds."""
STEP_FOLDER = re.compile(r"(step|snapshot)-\d+")
"""Checkpoints: many, large, and no runs."""


def find_runs(root: Path) -> list[Path]:
    """The run folders at and below a folder, links not followed.

    A folder with a metrics.jsonl or a recipe.yaml and events is a run.
    """
    runs: list[Path] = []
    # Breadth first: where a limit ends the search, the runs near the root are found.
    queue: list[tuple[Path, int]] = [(root, 0)]
    num_folders = 0
    while queue and len(runs) < MAX_RUNS and num_folders < MAX_FOLDERS:
        folder, depth = queue.pop(0)
        num_folders += 1
        names, subfolders = _entries(folder)
        # A run that has not logged a step yet has a recipe and events; a recipe alone is no run.
        if METRICS in names or (RECIPE in names and EVENTS in names):
            runs.append(folder)
        if depth < MAX_DEPTH:
            queue += [(folder / name, depth + 1) for name in subfolders]

    return sorted(runs)


def _entries(folder: Path) -> tuple[set[str], list[str]]:
    """Names of files, and folders worth a look."""
    files: set[str] = set()
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    files.add(entry.name)
                    continue
                is_skipped = entry.name.startswith(".") or entry.name in SKIPPED
                if not is_skipped and not STEP_FOLDER.match(entry.name):
                    folders.append(entry.name)
    except OSError:
        return set(), []

    return files, sorted(folders)


def run_id(source: str, path: str) -> str:
    """A short name for addresses; the same at every start."""
    return hashlib.sha256(f"{source}\n{path}".encode(errors="surrogateescape")).hexdigest()[:12]


@dataclass
class RunStatus:
    """What the list of runs shows."""

    state: State = "stopped"
    step: int | None = None
    total_steps: int | None = None
    updated: float = 0.0
    """When its metrics last changed, in seconds since 1970."""
    started: float | None = None
    phase: str = ""
    ranks: int = 0
    hosts: list[str] = field(default_factory=list)
    last_event: str = ""
    cause: str = ""
    """Why a failed run ended, in one line; empty for any other state."""
    alerts: int = 0


class StatusReader:
    """Reads the small files of a run folder; what has not changed is not read again."""

    def __init__(self, folder: Path, *, is_here: bool = True) -> None:
        self.folder = folder
        self.is_here = is_here
        # RUN/stages/NAME: a stage writes its metrics and summary to its own folder, heartbeats
        # and events to the run's.
        self.home = folder
        if folder.parent.name == STAGES:
            self.home = folder.parent.parent
        # Each with the `file_mark` of the file that it was read from.
        self._events: tuple[tuple[int, int], list[dict[str, Any]]] = ((0, 0), [])
        self._steps: tuple[tuple[int, int], int | None] = ((0, 0), None)

    def events(self) -> list[dict[str, Any]]:
        """The newest events, oldest first."""
        path = self.home / EVENTS
        mark = file_mark(path)
        if mark != self._events[0]:
            self._events = (mark, parse_events(last_lines(path, EVENT_TAIL_BYTES)[0]))
        return self._events[1]

    def total_steps(self) -> int | None:
        """Steps of the whole run where its recipe says so."""
        path = self.folder / RECIPE
        mark = file_mark(path)
        if mark != self._steps[0]:
            self._steps = (mark, planned_steps(read_recipe_file(self.folder)))
        return self._steps[1]

    def read(self, newest: dict[str, float | str | None], now: float | None = None) -> RunStatus:
        """The status of the run.

        `newest` are its newest metrics, `now` the clock of the machine it runs on.
        """
        if now is None:
            now = time.time()

        events = self.events()
        beats = read_beats(self.home)
        alive = [beat for beat in beats if self._is_alive(beat, now)]
        state = self._state(events, beats, alive, newest, now)

        status = RunStatus(
            state=state,
            ranks=len(alive),
            hosts=sorted({beat.host for beat in alive}),
            alerts=sum(event.get("event") not in ("start", "finish") for event in events),
        )
        changed_ns, _ = file_mark(self.folder / METRICS)
        status.updated = changed_ns / 1e9

        step = newest.get("step")
        if isinstance(step, float) and math.isfinite(step):
            status.step = int(step)
        if state == "done":
            status.total_steps = status.step  # what it has reached, whatever was planned
        else:
            status.total_steps = self.total_steps() or _estimated_steps(newest)

        starts = [event for event in events if event.get("event") == "start"]
        if starts:
            status.started = _time(starts[-1])
        if alive:
            status.phase = alive[0].phase
        if events:
            status.last_event = str(events[-1].get("event", ""))
        if state == "failed":
            status.cause = _cause(events)
        return status

    def _is_alive(self, beat: Beat, now: float) -> bool:
        # A process of this machine can be looked for; of one elsewhere only the time is known.
        if self.is_here:
            return is_alive(beat)
        return now - beat.at < BEAT_SECONDS

    def _state(
        self,
        events: Sequence[dict[str, Any]],
        beats: Sequence[Beat],
        alive: Sequence[Beat],
        newest: dict[str, Any],
        now: float,
    ) -> State:
        """The state, from the strongest evidence to the weakest."""
        has_summary = (self.folder / SUMMARY).is_file()
        # A stage: the heartbeats in its run's folder are those of a later stage.
        if has_summary and self.home != self.folder:
            return "done"

        if alive:
            patience = STALL_SECONDS
            step_seconds = newest.get("step_seconds")
            if isinstance(step_seconds, float):
                patience = max(patience, STALL_STEPS * step_seconds)
            progress_at = max(beat.progress_at for beat in alive)
            if now - progress_at > patience:
                return "stalled"
            return "live"

        # Between two attempts no rank runs, but a supervisor starts the next one.
        if self.is_here and is_supervised(self.home):
            return "live"

        # Elsewhere, as in S3, there may be no heartbeats.
        changed_ns, _ = file_mark(self.folder / METRICS)
        is_fresh = now - changed_ns / 1e9 < FRESH_SECONDS
        if not self.is_here and not beats and not has_summary and is_fresh:
            return "live"

        # Nothing runs any more. A run that was resumed has several of these; the last one counts.
        turning_points = ("start", "finish", "crash", "hang")
        kinds = [event.get("event") for event in events if event.get("event") in turning_points]
        last_kind = kinds[-1] if kinds else None
        if has_summary and last_kind in (None, "finish"):
            return "done"
        if last_kind == "finish":
            return "stopped"
        if beats or kinds:
            return "failed"
        return "stopped"


def _cause(events: Sequence[dict[str, Any]]) -> str:
    """What the newest crash or hang reported; a process that was killed reports nothing."""
    for event in reversed(events):
        if event.get("event") in ("crash", "hang"):
            lines = str(event.get("text", "")).strip().splitlines()
            if lines:
                return lines[0][:CAUSE_CHARACTERS]
        # Crashes before the newest start are those of earlier attempts.
        if event.get("event") == "start":
            break
    return "killed, or its machine failed: it reported nothing"


def parse_events(lines: bytes) -> list[dict[str, Any]]:
    """The events in some lines; what is no event is left out."""
    events: list[dict[str, Any]] = []
    for line in lines.split(b"\n"):
        if not line:
            continue
        try:
            event: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)

    return events


def file_mark(path: Path) -> tuple[int, int]:
    """When a file changed and its size; zeros where there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def read_recipe_file(folder: Path) -> dict[str, Any]:
    """The recipe of a run as plain values; empty where it cannot be read.

    Parsed again only when it changes.
    """
    return _parsed_recipe(folder / RECIPE, file_mark(folder / RECIPE))


@lru_cache(maxsize=MAX_RUNS)
def _parsed_recipe(path: Path, mark: tuple[int, int]) -> dict[str, Any]:
    """`mark` is part of the cache's key: a recipe that changed has another one."""
    try:
        recipe = parse_yaml(read_bounded(path, RECIPE_BYTES).decode(errors="replace"), RECIPE)
    except (OSError, HeadwayError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def read_summary_file(folder: Path) -> dict[str, Any]:
    """The summary of a finished run; empty where there is none."""
    try:
        summary = load_json(folder / SUMMARY, SUMMARY_BYTES)
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def planned_steps(recipe: dict[str, Any]) -> int | None:
    """The steps of all stages together; None where the recipe leaves them to the data."""
    default = recipe.get("steps")
    steps: list[Any] = []
    stages = recipe.get("stages")
    if isinstance(stages, list):
        steps = [stage.get("steps", default) for stage in stages if isinstance(stage, dict)]
    if not steps:
        steps = [default]

    # Exact types: True is an int, and `steps: true` is no number.
    if all(type(count) is int for count in steps):
        return sum(steps)
    return None


def _estimated_steps(newest: dict[str, Any]) -> int | None:
    """The steps of a run from its own estimate of the time that is left."""
    step = newest.get("step")
    eta = newest.get("eta_seconds")
    seconds = newest.get("step_seconds")
    if (
        isinstance(step, float)
        and isinstance(eta, float)
        and isinstance(seconds, float)
        and seconds > 0
        and 0 <= eta < LONGEST_ETA_SECONDS
    ):
        return int(step + eta / seconds)
    return None


def _time(event: dict[str, Any]) -> float | None:
    seconds = event.get("time")
    if isinstance(seconds, (int, float)):
        return float(seconds)
    return None


def flat_values(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A recipe as one row per setting: `{a: {b: 1}}` -> `a.b`, 1.

    Lists of plain values stay whole.
    """
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from flat_values(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, list) and any(isinstance(item, (dict, list)) for item in values):
        for number, value in enumerate(values):
            yield from flat_values(value, f"{prefix}.{number}")
    else:
        yield prefix, values

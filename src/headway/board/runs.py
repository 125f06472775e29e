"""Folders come in; the runs below them go out, each with its state and its newest numbers. Nothing is ever written there.

State of a run, from its heartbeats, its events and its summary:

    live       a rank is running              stalled    it runs, but makes no progress
    done       it has a summary.json          stopped    it was stopped, and can be resumed
    failed     it crashed, or its process is gone without a word
"""

from __future__ import annotations

import hashlib
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
from headway.config.yaml_reader import parse_yaml
from headway.errors import HeadwayError
from headway.runtime.heartbeat import Beat, is_alive, read_beats
from headway.runtime.json_file import load_json, read_bounded
from headway.track.events import EVENTS
from headway.train.control import is_supervised
from headway.train.run_folder import METRICS, RECIPE, SUMMARY
from headway.train.stages import FOLDER as STAGES

State = Literal["live", "stalled", "done", "stopped", "failed"]
MAX_DEPTH = 6
MAX_RUNS = 2000
MAX_FOLDERS = 50_000
"""A look below a root ends there: a home folder is no place for runs."""
SKIPPED = {
    "checkpoints",
    "final",
    "logs",
    "tensorboard",
    "tokenizer",
    "node_modules",
    "wandb",
    "mlruns",
    "code",
    "__pycache__",
}
STALL_SECONDS = 120.0
STALL_STEPS = 20
FRESH_SECONDS = 60.0
"""A run elsewhere without heartbeats is live if its metrics changed within this time."""
SUMMARY_BYTES = 4 << 20
RECIPE_BYTES = 512 << 10
EVENT_TAIL_BYTES = 64 << 10
CAUSE_CHARACTERS = 400


def find_runs(root: Path) -> list[Path]:
    """The run folders at and below a folder, links not followed. A folder with a metrics.jsonl or a recipe.yaml and events is a run."""
    found: list[Path] = []
    queue: list[tuple[Path, int]] = [(root, 0)]
    looked = 0
    while queue and len(found) < MAX_RUNS and looked < MAX_FOLDERS:
        folder, depth = queue.pop(0)
        looked += 1
        names, below = _entries(folder)
        if METRICS in names or (RECIPE in names and EVENTS in names):
            found.append(folder)
        if depth < MAX_DEPTH:
            queue += [(folder / name, depth + 1) for name in below]
    return sorted(found)


def _entries(folder: Path) -> tuple[set[str], list[str]]:
    """Names of files, and folders worth a look."""
    files: set[str] = set()
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if (
                        not entry.name.startswith(".")
                        and entry.name not in SKIPPED
                        and not re.match(r"(step|snapshot)-\d+", entry.name)
                    ):
                        folders.append(entry.name)
                else:
                    files.add(entry.name)
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
        self.folder, self.is_here = folder, is_here
        # a stage writes its metrics and summary to its own folder, heartbeats and events to the run's
        self.home = folder.parent.parent if folder.parent.name == STAGES else folder
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
        """The status of the run; `newest` are its newest metrics, `now` the clock of the machine it runs on."""
        now = time.time() if now is None else now
        events = self.events()
        metrics = file_mark(self.folder / METRICS)
        starts = [one for one in events if one.get("event") == "start"]
        step = newest.get("step")
        beats = read_beats(self.home)
        alive = [beat for beat in beats if self._is_alive(beat, now)]
        state = self._state(events, beats, alive, newest, now)
        last = int(step) if isinstance(step, float) and math.isfinite(step) else None
        return RunStatus(
            state=state,
            step=last,
            total_steps=last if state == "done" else self.total_steps() or _estimated_steps(newest),
            updated=metrics[0] / 1e9,
            started=_time(starts[-1]) if starts else None,
            phase=alive[0].phase if alive else "",
            ranks=len(alive),
            hosts=sorted({beat.host for beat in alive}),
            last_event=str(events[-1].get("event", "")) if events else "",
            cause=_cause(events) if state == "failed" else "",
            alerts=sum(one.get("event") not in ("start", "finish") for one in events),
        )

    def _is_alive(self, beat: Beat, now: float) -> bool:
        return is_alive(beat) if self.is_here else now - beat.at < 15.0

    def _state(
        self,
        events: Sequence[dict[str, Any]],
        beats: Sequence[Beat],
        alive: Sequence[Beat],
        newest: dict[str, Any],
        now: float,
    ) -> State:
        is_over = (self.folder / SUMMARY).is_file()
        if is_over and self.home != self.folder:
            return "done"
        if alive:
            seconds = newest.get("step_seconds")
            patience = max(
                STALL_SECONDS, STALL_STEPS * seconds if isinstance(seconds, float) else 0.0
            )
            return "stalled" if now - max(beat.progress_at for beat in alive) > patience else "live"
        if self.is_here and is_supervised(self.home):
            return "live"
        if (
            not self.is_here
            and not beats
            and not is_over
            and now - file_mark(self.folder / METRICS)[0] / 1e9 < FRESH_SECONDS
        ):
            return "live"
        kinds = [
            one.get("event")
            for one in events
            if one.get("event") in ("start", "finish", "crash", "hang")
        ]
        if is_over and (not kinds or kinds[-1] == "finish"):
            return "done"
        if kinds and kinds[-1] == "finish":
            return "stopped"
        return "failed" if beats or kinds else "stopped"


def _cause(events: Sequence[dict[str, Any]]) -> str:
    """What the newest crash or hang reported; a process that was killed reports nothing."""
    for event in reversed(events):
        if event.get("event") in ("crash", "hang"):
            lines = str(event.get("text", "")).strip().splitlines()
            if lines:
                return lines[0][:CAUSE_CHARACTERS]
        if event.get("event") == "start":
            break
    return "killed, or its machine failed: it reported nothing"


def parse_events(lines: bytes) -> list[dict[str, Any]]:
    """The events in some lines; what is no event is left out."""
    import json

    found: list[dict[str, Any]] = []
    for line in lines.split(b"\n"):
        try:
            one: Any = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(one, dict) and isinstance(one.get("event"), str):
            found.append(one)
    return found


def file_mark(path: Path) -> tuple[int, int]:
    """When a file changed and its size; zeros where there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def read_recipe_file(folder: Path) -> dict[str, Any]:
    """The recipe of a run as plain values; empty where it cannot be read. Parsed again only when it changes."""
    return _parsed_recipe(folder / RECIPE, file_mark(folder / RECIPE))


@lru_cache(maxsize=MAX_RUNS)
def _parsed_recipe(path: Path, mark: tuple[int, int]) -> dict[str, Any]:
    try:
        found = parse_yaml(read_bounded(path, RECIPE_BYTES).decode(errors="replace"), RECIPE)
    except (OSError, HeadwayError):
        return {}
    return found if isinstance(found, dict) else {}


def read_summary_file(folder: Path) -> dict[str, Any]:
    """The summary of a finished run; empty where there is none."""
    try:
        found = load_json(folder / SUMMARY, SUMMARY_BYTES)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def planned_steps(recipe: dict[str, Any]) -> int | None:
    """The steps of all stages together; None where the recipe leaves them to the data."""
    stages = recipe.get("stages")
    given = [one for one in stages if isinstance(one, dict)] if isinstance(stages, list) else []
    parts: list[Any] = [one.get("steps", recipe.get("steps")) for one in given] or [
        recipe.get("steps")
    ]
    return sum(parts) if all(type(part) is int for part in parts) else None


def _estimated_steps(newest: dict[str, Any]) -> int | None:
    step, eta, seconds = (newest.get(name) for name in ("step", "eta_seconds", "step_seconds"))
    if (
        isinstance(step, float)
        and isinstance(eta, float)
        and isinstance(seconds, float)
        and seconds > 0
        and 0 <= eta < 1e12
    ):
        return int(step + eta / seconds)
    return None


def _time(event: dict[str, Any]) -> float | None:
    found = event.get("time")
    return float(found) if isinstance(found, (int, float)) else None


def flat_values(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{a: {b: 1}}` -> `a.b`, 1: a recipe as one row per setting. Lists of plain values stay whole."""
    if isinstance(values, dict) and values:
        for key, below in values.items():
            yield from flat_values(below, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, list) and any(isinstance(one, (dict, list)) for one in values):
        for number, below in enumerate(values):
            yield from flat_values(below, f"{prefix}.{number}")
    else:
        yield prefix, values

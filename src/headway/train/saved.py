"""RUN/saved.json: which run this is and the newest step it has saved, so that checkpoints that are missing, or another run's, are noticed.

It is written after each save and never ahead of the disk: what it names was complete there once. A damaged one counts as none.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headway.checkpoint.load import FoundCheckpoint, step_folders, step_of
from headway.errors import ConfigError
from headway.runtime.paths import AnyPath
from headway.runtime.sealed import parse_sealed_json, sealed_json
from headway.runtime.storage import write_atomic

log = logging.getLogger("headway")

FILE = "saved.json"
TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Saved:
    """What a run folder remembers of its checkpoints."""

    run: str
    """Made when the run began; every checkpoint it saves carries it."""
    step: int | None = None
    """The newest step that was saved; None = none yet."""


def read_saved(folder: Path) -> Saved | None:
    """What the run folder says; None where it says nothing."""
    path = folder / FILE
    try:
        given: Any = parse_sealed_json(path.read_bytes())
        return Saved(str(given["run"]), None if given["step"] is None else int(given["step"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        log.warning("%s is damaged (%s) and is written again at the next save", path, problem)
        return None


def write_saved(folder: Path, saved: Saved) -> None:
    """Remember."""
    write_atomic(folder / FILE, sealed_json(asdict(saved)))


def forget_saved(folder: Path) -> Saved:
    """Before checkpoints are set aside: nothing is expected of them until `write_saved`. Returns which run it is, a new one if unknown."""
    before = read_saved(folder)
    if before is None:
        return new_run()
    write_saved(folder, replace(before, step=None))
    return replace(before, step=None)


def new_run() -> Saved:
    """A run that begins."""
    return Saved(uuid.uuid4().hex)


def refuse_dangling(paths: Sequence[Path]) -> None:
    """Refuse links to nothing: a disk that is not mounted is no reason to begin anew."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{path} is a link to {path.readlink()}, where there is nothing. Mount or restore it, or remove the link.")


def refuse_leftovers(folder: Path, checkpoints: Path, recipe: str) -> None:
    """Refuse to begin in a folder where a run has been whose recipe is gone."""
    if newest := next(reversed(step_folders(checkpoints)), None):
        raise ConfigError(
            f"{newest} is a checkpoint of an earlier run, and {folder / recipe} is missing. Put it back; --resume {newest} continues from "
            "that checkpoint, --resume never sets all of them aside and begins anew."
        )
    for name in (FILE, "metrics.jsonl", "summary.json", "stages.json"):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} is of an earlier run, and {folder / recipe} is missing: the folder was removed in part. Restore it, "
                "choose another run.name, or use --resume never to begin anew."
            )


def refuse_missing(folder: Path, places: Sequence[AnyPath], saved: Saved | None, found: Sequence[FoundCheckpoint]) -> None:
    """Refuse to continue from less than was saved; what is there and damaged has been named already."""
    there = [one.reader.step for one in found if one.reader is not None]
    damaged = [step_of(path) for one in found for path, _ in one.rejected]
    if saved is not None and saved.step is not None and max([*there, *damaged], default=-1) < saved.step:
        where = " or ".join(str(place) for place in places)
        older = f"the newest there is of step {max(there)}" if there else "there is none"
        raise ConfigError(
            f"{folder}: the checkpoint of step {saved.step} was saved in {where} and is missing; {older}. Mount or restore it. "
            "--resume PATH continues from an older checkpoint, --resume never begins anew."
        )
    if not there and not damaged and (steps := _last_step(folder / "metrics.jsonl")):
        log.warning("%s: %d steps were trained here and no checkpoint of them was saved; the run begins at step 0", folder, steps)


def _last_step(metrics: Path) -> int:
    """The step of the last whole line; 0 where there is none."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0

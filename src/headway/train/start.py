"""How a run starts: the run folder comes in; whether the recipe resumes it, starts new or is refused goes out. Writes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.files import open_files
from headway.checkpoint.load import (
    FoundCheckpoint,
    Reader,
    locate,
    newest_good,
    open_checkpoint,
    step_folders,
    step_of,
)
from headway.checkpoint.remote import PROBE_SECONDS, RemoteCheckpoints
from headway.checkpoint.stored_model import FINAL
from headway.config.load import load
from headway.config.regular_file import regular_only
from headway.config.section import differences
from headway.errors import CheckpointError, ConfigError
from headway.runtime.json_file import read_bounded
from headway.runtime.paths import AnyPath, parse_path
from headway.runtime.process import restarted_job
from headway.runtime.s3 import StoreDown
from headway.runtime.storage import check_writable
from headway.train.config import Recipe
from headway.train.control import on_first_rank
from headway.train.run_folder import (
    FILES,
    JOB,
    RECIPE,
    SAVED,
    SaveRecord,
    read_save_record,
    refuse_broken_links,
    unused_name,
    was_used,
)
from headway.train.run_name import refuse_missing_data

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup

log = logging.getLogger("headway")

TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Start:
    """How a run starts."""

    folder: Path
    checkpoint: Reader | None
    """The checkpoint to resume from; None = step 0."""
    set_aside: Path | None = None
    """Where to move an existing run of the same name first."""
    from_scratch: bool = False
    """Start at step 0, ignoring what the folder contains."""
    changes: tuple[str, ...] = ()
    """Free settings that differ from the resumed run."""


def decide_start(recipe: Recipe, resume: str = "auto") -> Start:
    """Read the run folder and decide; a run with another model or data is refused with the differences. `resume`: auto, never or a path."""
    folder = recipe.run.folder
    local, place = recipe.checkpoint.locations(folder)
    refuse_broken_links([folder, folder / RECIPE, local])
    for here in (folder, local):
        check_writable(here)
    remote = None if place is None else RemoteCheckpoints(place, recipe.checkpoint)
    if remote is not None:
        _probe(remote, has_begun=(folder / RECIPE).exists())
    if resume not in ("auto", "never"):
        path = locate(resume)
        refuse_misplaced(folder)
        old = path.parent.parent / RECIPE if isinstance(path, Path) else path.parent / RECIPE
        return Start(folder, open_checkpoint(path), changes=tuple(_allowed_changes(old, recipe)))
    if resume == "never":
        return Start(
            folder,
            None,
            set_aside=unused_name(folder) if was_used(folder) else None,
            from_scratch=True,
        )
    places = [
        folder,
        *([remote.location] if remote is not None else []),
    ]  # a disk may be new where the object store is not
    old = next(
        (place / RECIPE for place in places if open_files(place).read(RECIPE) is not None), None
    )
    if old is None:
        refuse_leftovers(folder, local)
        refuse_misplaced(folder)
        return Start(folder, None)
    changes = _allowed_changes(old, recipe)
    refuse_misplaced(folder)
    stored, saved = (
        [*([remote.location] if remote is not None else []), local],
        read_save_record(folder),
    )
    finds = [newest_good(here, "" if saved is None else saved.run) for here in stored]
    _refuse_missing(folder, stored, saved, finds)
    found = max(finds, key=_step_found)
    for path, reason in found.rejected:
        log.warning("%s cannot be used: %s", path, reason)
    if found.path is None and found.rejected:
        raise CheckpointError(
            f"{local}: no checkpoint there can be read. Use --resume never to start a new run, or --resume PATH."
        )
    return Start(folder, found.reader, changes=tuple(changes))


def refuse_misplaced(folder: Path) -> None:
    """Refuse a file where a run writes a folder, and the reverse: found now, not after the last step."""
    for name in ("logs", FINAL):
        path = folder / name
        if path.is_symlink() and name == FINAL:
            raise ConfigError(
                f"{path} is a link, and a run writes a folder there. Move it away, or choose another run.name."
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"{path} is a file, and a run keeps a folder there. Move it away, or choose another run.name."
            )
    for name in FILES:
        if (folder / name).is_dir():
            raise ConfigError(
                f"{folder / name} is a folder, and a run keeps a file there. Move it away, or choose another run.name."
            )


def refuse_leftovers(folder: Path, checkpoints: Path) -> None:
    """Refuse to start in a folder that holds parts of a run whose recipe is gone."""
    if newest := next(reversed(step_folders(checkpoints)), None):
        raise ConfigError(
            f"{newest} is a checkpoint of an earlier run, and {folder / RECIPE} is missing. Put it back. --resume {newest} resumes from "
            "that checkpoint; --resume never sets all of them aside and starts a new run."
        )
    for name in (SAVED, "metrics.jsonl", "summary.json", "stages.json"):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} is of an earlier run, and {folder / RECIPE} is missing: the folder was removed in part. Restore it, "
                "choose another run.name, or use --resume never to start a new run."
            )


def _refuse_missing(
    folder: Path,
    places: Sequence[AnyPath],
    saved: SaveRecord | None,
    found: Sequence[FoundCheckpoint],
) -> None:
    """Refuse to resume from an older step than was saved; a damaged checkpoint is not missing."""
    readable = [one.reader.step for one in found if one.reader is not None]
    damaged = [step_of(path) for one in found for path, _ in one.rejected]
    if (
        saved is not None
        and saved.step is not None
        and max([*readable, *damaged], default=-1) < saved.step
    ):
        where = " or ".join(str(place) for place in places)
        older = f"the newest there is of step {max(readable)}" if readable else "there is none"
        raise ConfigError(
            f"{folder}: the checkpoint of step {saved.step} was saved in {where} and is missing; {older}. Mount or restore it. "
            "--resume PATH resumes from an older checkpoint, --resume never starts a new run."
        )
    if not readable and not damaged and (steps := _last_step(folder / "metrics.jsonl")):
        log.warning(
            "%s: %d steps were trained here and no checkpoint of them was saved; the run starts at step 0",
            folder,
            steps,
        )


def _last_step(metrics: Path) -> int:
    """The step of the last complete line; 0 without one."""
    try:
        with open(metrics, "rb", opener=regular_only) as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0


def _step_found(found: FoundCheckpoint) -> int:
    """Orders finds by their step; one with nothing but damaged checkpoints comes before one with none."""
    return found.reader.step if found.reader is not None else 0 if found.rejected else -1


def _probe(remote: RemoteCheckpoints, *, has_begun: bool) -> None:
    """Refuse an object store that cannot be written. One that worked before may be down for a while: retry, and raise no ConfigError."""
    try:
        remote.probe(remote.config.retry_seconds if has_begun else PROBE_SECONDS)
    except CheckpointError as problem:
        if has_begun and isinstance(problem, StoreDown):
            raise
        raise ConfigError(f"checkpoint.to: {problem}") from None


def is_restart(folder: Path) -> bool:
    """Whether this start follows one of the same job that began the run: it resumes, for any value of --resume."""
    job, again = restarted_job()
    try:
        return again and job is not None and read_bounded(folder / JOB) == job.encode()
    except OSError:
        return False


def agree_on_start(recipe: Recipe, resume: str, world: RankGroup) -> Start:
    """Decide on the first rank, which also checks the checkpoint's bytes; all ranks start the same way or refuse the same way."""
    start: Start | None = None

    def decide() -> dict[str, Any]:
        nonlocal start
        resumes = is_restart(recipe.run.folder) and (
            resume == "never"
            or bool(step_folders(recipe.checkpoint.locations(recipe.run.folder)[0]))
        )
        start = decide_start(recipe, "auto" if resumes else resume)
        return {
            "checkpoint": None if start.checkpoint is None else str(start.checkpoint.path),
            "set_aside": None if start.set_aside is None else str(start.set_aside),
            "from_scratch": start.from_scratch,
            "changes": list(start.changes),
        }

    decided = on_first_rank(world, decide)
    if start is None:
        checkpoint = (
            None if decided["checkpoint"] is None else _open_verified(decided["checkpoint"], resume)
        )
        set_aside = None if decided["set_aside"] is None else Path(decided["set_aside"])
        start = Start(
            recipe.run.folder,
            checkpoint,
            set_aside,
            decided["from_scratch"],
            tuple(decided["changes"]),
        )
    return start


def _open_verified(text: str, resume: str) -> Reader:
    """The checkpoint the first rank has chosen; a folder that `auto` found was verified by it and is not verified again."""
    place = parse_path(text)
    return open_checkpoint(place, verify=resume != "auto" or not isinstance(place, Path))


def _allowed_changes(old: AnyPath, recipe: Recipe) -> list[str]:
    """The free settings that differ from an earlier recipe; a fixed one that differs is refused."""
    source = open_files(old.parent)
    if source.read(old.name) is None:
        return []
    fixed, free = differences(load(Recipe, source.folder([old.name], ".") / old.name), recipe)
    if fixed:
        refuse_missing_data(
            recipe
        )  # a file that is not there explains more than what differs because of it
        raise ConfigError(
            f"{old.parent} is a run with other settings that a resumed run may not change: {'; '.join(fixed)}. "
            "Set them back, choose another run.name, or use --resume never to start a new run."
        )
    return [change for change in free if not change.startswith("run.")]

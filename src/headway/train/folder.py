"""The run folder: what a run writes beside its checkpoints, and the decision whether a recipe continues what lies there.

Nothing is written until the decision is made.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.checkpoint.files import open_files
from headway.checkpoint.load import FoundCheckpoint, Reader, locate, newest_good, open_checkpoint, step_folders
from headway.checkpoint.remote import PROBE_SECONDS, RemoteCheckpoints
from headway.checkpoint.retention import set_aside_later
from headway.config.load import dump_yaml, load
from headway.config.section import differences
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.infer.load import FINAL
from headway.parallel.collectives import RankGroup
from headway.runtime.heartbeat import clear_beats
from headway.runtime.json_file import load_json
from headway.runtime.machine import environment
from headway.runtime.paths import AnyPath, parse_path
from headway.runtime.process import restarted_job, supervisor
from headway.runtime.run_lock import LOCK
from headway.runtime.s3 import StoreDown
from headway.runtime.storage import check_writable, write_atomic
from headway.runtime.temporary import clear_temporary
from headway.track.outside import EVENTS, begin_claims
from headway.train.config import Recipe
from headway.train.request import withdraw
from headway.train.saved import FILE as SAVED
from headway.train.saved import forget_saved, new_run, read_saved, refuse_dangling, refuse_leftovers, refuse_missing, write_saved

log = logging.getLogger("headway")

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
JOB = Path("logs") / "job.txt"
FILES = (RECIPE, METRICS, SUMMARY, "train.log", EVENTS)


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    folder: Path
    checkpoint: Reader | None
    """The checkpoint to continue from; None = from the beginning."""
    set_aside: Path | None = None
    """Where an older run of the same name is to be moved first."""
    anew: bool = False
    """Begin from the start whatever lies there."""
    changes: tuple[str, ...] = ()
    """Free settings that differ from the run that is continued."""


def decide_start(recipe: Recipe, resume: str = "auto") -> Start:
    """Look at the run folder and decide; a run of another model or data is refused with what differs. `resume`: auto, never or a place."""
    folder = recipe.run.folder
    local, place = recipe.checkpoint.locations(folder)
    refuse_dangling([folder, folder / RECIPE, local])
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
        return Start(folder, None, set_aside=unused_name(folder) if was_used(folder) else None, anew=True)
    places = [folder, *([remote.place] if remote is not None else [])]  # a disk may be new where the store is not
    old = next((place / RECIPE for place in places if open_files(place).read(RECIPE) is not None), None)
    if old is None:
        refuse_leftovers(folder, local, RECIPE)
        refuse_misplaced(folder)
        return Start(folder, None)
    changes = _allowed_changes(old, recipe)
    refuse_misplaced(folder)
    stored, saved = [*([remote.place] if remote is not None else []), local], read_saved(folder)
    finds = [newest_good(here, "" if saved is None else saved.run) for here in stored]
    refuse_missing(folder, stored, saved, finds)
    found = max(finds, key=_step_found)
    for path, reason in found.rejected:
        log.warning("%s cannot be used: %s", path, reason)
    if found.path is None and found.rejected:
        raise CheckpointError(f"{local}: no checkpoint there can be read. Use --resume never to begin anew beside them, or --resume PATH.")
    return Start(folder, found.reader, changes=tuple(changes))


def refuse_misplaced(folder: Path) -> None:
    """Refuse what stands where a run would write and is of another kind: found now, not when the last step is done."""
    for name in ("logs", FINAL):
        path = folder / name
        if path.is_symlink() and name == FINAL:
            raise ConfigError(f"{path} is a link, and a run writes a folder there. Move it away, or choose another run.name.")
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, and a run keeps a folder there. Move it away, or choose another run.name.")
    for name in FILES:
        if (folder / name).is_dir():
            raise ConfigError(f"{folder / name} is a folder, and a run keeps a file there. Move it away, or choose another run.name.")


def _step_found(found: FoundCheckpoint) -> int:
    """Which of two finds is the newer; one with nothing but damage is still better to hear of than nothing."""
    return found.reader.step if found.reader is not None else 0 if found.rejected else -1


def _probe(remote: RemoteCheckpoints, *, has_begun: bool) -> None:
    """Refuse a store that cannot be written. One that worked before may be down for a while: it is waited for, and is nobody's mistake."""
    try:
        remote.probe(remote.config.retry_seconds if has_begun else PROBE_SECONDS)
    except CheckpointError as problem:
        if has_begun and isinstance(problem, StoreDown):
            raise
        raise ConfigError(f"checkpoint.to: {problem}") from None


def open_told(text: str, resume: str) -> Reader:
    """What the first rank has chosen; a folder that `auto` found it has read to the last byte, so that here nothing is checked again."""
    place = parse_path(text)
    return open_checkpoint(place, verify=resume != "auto" or not isinstance(place, Path))


def is_restart(folder: Path) -> bool:
    """Whether this start follows one of the same job that has begun the run: it goes on, whatever the command line says about beginning."""
    job, again = restarted_job()
    try:
        return again and job is not None and (folder / JOB).read_text(encoding="utf-8") == job
    except OSError:
        return False


def first_decides(world: RankGroup, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first rank finds, on every rank (plain Python); a mistake it finds is raised everywhere, so that all refuse alike."""
    told: dict[str, Any] = {}
    if world.rank == 0:
        try:
            told = work()
        except HeadwayError as problem:
            world.gather({"error": str(problem), "exit_code": problem.exit_code})
            raise
    told = world.gather(told)[0]
    if "error" in told:
        raise (ConfigError if told["exit_code"] == ConfigError.exit_code else CheckpointError)(told["error"])
    return told


def agree_on_start(recipe: Recipe, resume: str, world: RankGroup) -> Start:
    """The first rank decides and checks the checkpoint's bytes; the others are told, so that all start alike or refuse alike."""
    start: Start | None = None

    def decided() -> dict[str, Any]:
        nonlocal start
        goes_on = is_restart(recipe.run.folder) and (
            resume == "never" or bool(step_folders(recipe.checkpoint.locations(recipe.run.folder)[0]))
        )
        start = decide_start(recipe, "auto" if goes_on else resume)
        return {
            "checkpoint": None if start.checkpoint is None else str(start.checkpoint.path),
            "set_aside": None if start.set_aside is None else str(start.set_aside),
            "anew": start.anew,
            "changes": list(start.changes),
        }

    told = first_decides(world, decided)
    if start is None:
        checkpoint = None if told["checkpoint"] is None else open_told(told["checkpoint"], resume)
        set_aside = None if told["set_aside"] is None else Path(told["set_aside"])
        start = Start(recipe.run.folder, checkpoint, set_aside, told["anew"], tuple(told["changes"]))
    return start


def _allowed_changes(old: AnyPath, recipe: Recipe) -> list[str]:
    """The free settings that differ from an earlier recipe; a fixed one that differs is refused."""
    source = open_files(old.parent)
    if source.read(old.name) is None:
        return []
    fixed, free = differences(load(Recipe, source.folder([old.name], ".") / old.name), recipe)
    if fixed:
        raise ConfigError(
            f"{old.parent} is a run with other settings that a resumed run may not change: {'; '.join(fixed)}. "
            "Set them back, choose another run.name, or use --resume never to begin anew."
        )
    return [change for change in free if not change.startswith("run.")]


def was_used(folder: Path) -> bool:
    """Whether a run has been in a folder."""
    return any((folder / name).exists() for name in (RECIPE, METRICS, SAVED))


def unused_name(folder: Path) -> Path:
    """Where a folder that must make room is moved."""
    return next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}.old-{n}")).exists())


def move_aside(folder: Path, target: Path) -> None:
    """Rename a run folder that makes room; the lock of whoever moves it does not stay behind in it."""
    folder.rename(target)
    (target / LOCK).unlink(missing_ok=True)


def prepare_folder(start: Start, recipe: Recipe, moved: Callable[[], None] = lambda: None) -> None:
    """Make the folder and write what describes the run; `moved` is called at once where an older run has made room."""
    if start.set_aside is not None:
        move_aside(start.folder, start.set_aside)
        moved()
        log.info("the run that was there is now %s", start.set_aside)
    local, place = recipe.checkpoint.locations(start.folder)
    remote = None if place is None else RemoteCheckpoints(place, recipe.checkpoint)
    saved = new_run()
    if start.checkpoint is not None or start.anew:
        saved = forget_saved(start.folder)
        step = -1 if start.checkpoint is None else start.checkpoint.step
        for later in [*set_aside_later(local, step), *(remote.set_aside_later(step) if remote is not None else [])]:
            log.info("a later checkpoint was set aside: %s", later)
    begin_in(start.folder)
    write_atomic(start.folder / RECIPE, dump_yaml(recipe))
    if start.checkpoint is not None and start.checkpoint.path.parent in (local.resolve(), place):
        saved = replace(saved, run=start.checkpoint.run or saved.run, step=start.checkpoint.step)
    write_saved(start.folder, saved)
    if remote is not None:
        remote.store.write(remote.place / RECIPE, dump_yaml(recipe).encode())


def begin_in(folder: Path) -> None:
    """Make a run folder and write what describes this start; what an earlier start left for others to read is taken away."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    job, _ = restarted_job()
    if job is not None:
        write_atomic(folder / JOB, job)
    for place in (folder, folder / "logs"):
        clear_temporary(place)
    clear_beats(folder)
    begin_claims(folder)
    if supervisor() is None:
        withdraw(folder)  # a request to stop that an earlier start left; under a supervisor it may be for this one
    keep_start(folder)


def keep_start(folder: Path) -> None:
    """Write what was called and where; the run folder holds that of the newest start, logs/starts/ that of every one, by number."""
    starts = folder / "logs" / "starts"
    starts.mkdir(exist_ok=True)
    number = max((int(path.name) for path in starts.iterdir() if path.name.isdecimal()), default=0) + 1
    found = environment()
    (starts / f"{number:04}").mkdir()
    for place in (starts / f"{number:04}", folder):
        write_atomic(place / "command.txt", shlex.join(sys.argv) + "\n")
        write_json(place / "environment.json", found)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """What a run that is done has left in summary.json; None where there is none, or it is damaged and is to be written anew."""
    try:
        found: Any = load_json(folder / SUMMARY)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and {"steps", "seconds", "checkpoint"} <= found.keys() else None


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file, whole or not at all."""
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")

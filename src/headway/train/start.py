"""How a run starts: the run folder comes in; whether the recipe resumes it, starts new or is
refused goes out. Writes nothing.

    --resume auto     the newest good checkpoint, local or in the object store; none: step 0
    --resume never    step 0; an existing run of that name is moved aside
    --resume PATH     that checkpoint

Invariant: no start loses steps silently. A folder that is incomplete, an unmounted disk or a
missing checkpoint is refused with what to do about it.
"""

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
from headway.checkpoint.stored_model import FINAL
from headway.config.load import load
from headway.config.regular_file import regular_only
from headway.config.section import differences
from headway.errors import CheckpointError, ConfigError, ObjectStoreUnavailable
from headway.runtime.json_file import read_bounded
from headway.runtime.paths import AnyPath, parse_path
from headway.runtime.process import restarted_job
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
    from headway.checkpoint.remote import RemoteCheckpoints
    from headway.parallel.collectives import RankGroup

log = logging.getLogger("headway")

TAIL_BYTES = 1 << 16
"""End of metrics.jsonl that is read for its last line."""


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
    """Read the run folder and decide.

    A run with another model or data is refused with the differences. `resume`: auto, never or a
    path.
    """
    folder = recipe.run.folder
    local, remote_location = recipe.checkpoint.locations(folder)
    refuse_broken_links([folder, folder / RECIPE, local])
    check_writable(folder)
    check_writable(local)
    remote = None
    if remote_location is not None:
        from headway.checkpoint.remote import RemoteCheckpoints

        remote = RemoteCheckpoints(remote_location, recipe.checkpoint)
        _probe_store(remote, has_begun=(folder / RECIPE).exists())

    if resume not in ("auto", "never"):
        path = locate(resume)
        refuse_misplaced(folder)
        # RUN/checkpoints/step-N on disk, PREFIX/step-N beside PREFIX/recipe.yaml in a store.
        if isinstance(path, Path):
            old_recipe = path.parent.parent / RECIPE
        else:
            old_recipe = path.parent / RECIPE
        changes = _allowed_changes(old_recipe, recipe)
        return Start(folder, open_checkpoint(path), changes=tuple(changes))

    if resume == "never":
        set_aside = None
        if was_used(folder):
            set_aside = unused_name(folder)
        return Start(folder, None, set_aside=set_aside, from_scratch=True)

    # A disk may be new where the object store is not, so both may hold the run.
    homes: list[AnyPath] = [folder]
    stores: list[AnyPath] = [local]
    if remote is not None:
        homes.append(remote.location)
        # First, so that of two checkpoints of one step the uploaded one is taken.
        stores.insert(0, remote.location)

    old_recipe = None
    for home in homes:
        if open_files(home).read(RECIPE) is not None:
            old_recipe = home / RECIPE
            break
    if old_recipe is None:
        refuse_leftovers(folder, local)
        refuse_misplaced(folder)
        return Start(folder, None)
    changes = _allowed_changes(old_recipe, recipe)
    refuse_misplaced(folder)

    saved = read_save_record(folder)
    run_id = "" if saved is None else saved.run
    newest_of_each = [newest_good(store, run_id) for store in stores]
    _refuse_missing(folder, stores, saved, newest_of_each)

    newest = max(newest_of_each, key=_newest_step)
    for path, reason in newest.rejected:
        log.warning("%s cannot be used: %s", path, reason)
    if newest.path is None and newest.rejected:
        raise CheckpointError(
            f"{local}: no checkpoint there can be read. "
            "Use --resume never to start a new run, or --resume PATH."
        )
    return Start(folder, newest.reader, changes=tuple(changes))


def refuse_misplaced(folder: Path) -> None:
    """Refuse a file where a run writes a folder, and the reverse.

    Found now, it costs nothing; found after the last step, it would cost final/.
    """
    for name in ("logs", FINAL):
        path = folder / name
        # Exporting removes the folder of an earlier export first, which fails for a link.
        if path.is_symlink() and name == FINAL:
            raise ConfigError(
                f"{path} is a link, and a run writes a folder there. "
                "Move it away, or choose another run.name."
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"{path} is a file, and a run keeps a folder there. "
                "Move it away, or choose another run.name."
            )
    for name in FILES:
        if (folder / name).is_dir():
            raise ConfigError(
                f"{folder / name} is a folder, and a run keeps a file there. "
                "Move it away, or choose another run.name."
            )


def refuse_leftovers(folder: Path, checkpoints: Path) -> None:
    """Refuse to start in a folder that holds parts of a run whose recipe is gone."""
    if newest := next(reversed(step_folders(checkpoints)), None):
        raise ConfigError(
            f"{newest} is a checkpoint of an earlier run, and {folder / RECIPE} is missing. "
            f"Put it back. --resume {newest} resumes from "
            "that checkpoint; --resume never sets all of them aside and starts a new run."
        )
    for name in (SAVED, "metrics.jsonl", "summary.json", "stages.json"):
        if (folder / name).exists():
            raise ConfigError(
                f"{folder / name} is of an earlier run, and {folder / RECIPE} is missing: "
                "the folder was removed in part. Restore it, "
                "choose another run.name, or use --resume never to start a new run."
            )


def _refuse_missing(
    folder: Path,
    stores: Sequence[AnyPath],
    saved: SaveRecord | None,
    newest_of_each: Sequence[FoundCheckpoint],
) -> None:
    """Refuse to resume from an older step than was saved; a damaged checkpoint is not missing."""
    readable: list[int] = []
    damaged: list[int] = []
    for newest in newest_of_each:
        if newest.reader is not None:
            readable.append(newest.reader.step)
        damaged += [step_of(path) for path, _ in newest.rejected]

    # saved.json is written after a save, so the checkpoint it names was complete.
    last_step = max([*readable, *damaged], default=-1)
    if saved is not None and saved.step is not None and last_step < saved.step:
        where = " or ".join(str(store) for store in stores)
        older = "there is none"
        if readable:
            older = f"the newest there is of step {max(readable)}"
        raise ConfigError(
            f"{folder}: the checkpoint of step {saved.step} was saved in {where} and is missing; "
            f"{older}. Mount or restore it. "
            "--resume PATH resumes from an older checkpoint, --resume never starts a new run."
        )
    if not readable and not damaged and (steps := _last_step(folder / "metrics.jsonl")):
        log.warning(
            "%s: %d steps were trained here and no checkpoint of them was saved; "
            "the run starts at step 0",
            folder,
            steps,
        )


def _last_step(metrics: Path) -> int:
    """The step of the last complete line; 0 without one."""
    # Only for a warning: whatever is wrong with the file is no reason to refuse the start.
    try:
        with open(metrics, "rb", opener=regular_only) as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            return int(json.loads(file.read().splitlines()[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return 0


def _newest_step(found: FoundCheckpoint) -> int:
    """Orders what was found by its step.

    A store with damaged checkpoints alone comes before an empty one.
    """
    if found.reader is not None:
        return found.reader.step
    if found.rejected:
        return 0
    return -1


def _probe_store(remote: RemoteCheckpoints, *, has_begun: bool) -> None:
    """Refuse an object store that cannot be written.

    One that worked before may be down for a while: retry, and raise no ConfigError.
    """
    from headway.checkpoint.remote import PROBE_SECONDS

    seconds = PROBE_SECONDS
    if has_begun:
        seconds = remote.config.retry_seconds
    try:
        remote.probe(seconds)
    except CheckpointError as problem:
        if has_begun and isinstance(problem, ObjectStoreUnavailable):
            raise
        raise ConfigError(f"checkpoint.to: {problem}") from None


def is_restart(folder: Path) -> bool:
    """Whether this start follows one of the same job that began the run.

    It resumes then, for any value of --resume.
    """
    job, is_again = restarted_job()
    if not is_again or job is None:
        return False
    try:
        return read_bounded(folder / JOB) == job.encode()
    except OSError:
        return False


def agree_on_start(recipe: Recipe, resume: str, world: RankGroup) -> Start:
    """Decide on the first rank, which also checks the checkpoint's bytes.

    All ranks start the same way or refuse the same way.
    """
    start: Start | None = None

    # Ranks exchange plain Python; the first one keeps its open checkpoint, too.
    def decide() -> dict[str, Any]:
        nonlocal start
        # A supervisor restarts a job with the command of its first start. --resume in it was
        # obeyed then, if the job began with `never` or has saved something since.
        resume_mode = resume
        if is_restart(recipe.run.folder):
            checkpoints = recipe.checkpoint.locations(recipe.run.folder)[0]
            if resume == "never" or step_folders(checkpoints):
                resume_mode = "auto"
        start = decide_start(recipe, resume_mode)
        return {
            "checkpoint": None if start.checkpoint is None else str(start.checkpoint.path),
            "set_aside": None if start.set_aside is None else str(start.set_aside),
            "from_scratch": start.from_scratch,
            "changes": list(start.changes),
        }

    decided = on_first_rank(world, decide)
    if start is not None:
        return start

    # On the other ranks: what the first one has decided.
    checkpoint = None
    if decided["checkpoint"] is not None:
        checkpoint = _open_verified(decided["checkpoint"], resume)
    set_aside = None
    if decided["set_aside"] is not None:
        set_aside = Path(decided["set_aside"])
    return Start(
        recipe.run.folder,
        checkpoint,
        set_aside,
        decided["from_scratch"],
        tuple(decided["changes"]),
    )


def _open_verified(text: str, resume: str) -> Reader:
    """The checkpoint the first rank has chosen.

    A folder that `auto` found was verified by it and is not verified again.
    """
    path = parse_path(text)
    return open_checkpoint(path, verify=resume != "auto" or not isinstance(path, Path))


def _allowed_changes(old: AnyPath, recipe: Recipe) -> list[str]:
    """The free settings that differ from an earlier recipe; a fixed one that differs is refused."""
    source = open_files(old.parent)
    if source.read(old.name) is None:
        return []
    old_recipe = load(Recipe, source.folder([old.name], ".") / old.name)
    fixed, free = differences(old_recipe, recipe)
    if fixed:
        # A file that is missing explains more than the settings that differ because of it.
        refuse_missing_data(recipe)
        raise ConfigError(
            f"{old.parent} is a run with other settings that a resumed run may not change: "
            f"{'; '.join(fixed)}. "
            "Set them back, choose another run.name, or use --resume never to start a new run."
        )
    return [change for change in free if not change.startswith("run.")]

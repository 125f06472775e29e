"""The run folder: its files, its locks, what a start writes there, and saved.json.

    recipe.yaml  metrics.jsonl  events.jsonl  train.log  summary.json  saved.json
    checkpoints/  final/  logs/

saved.json says which run this is and the newest step it has saved, so that checkpoints that are
missing, or another run's, are noticed. It is written after each save, never before: what it names
was complete on disk. A damaged one counts as none.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.retention import restore_links, set_aside_later
from headway.config.load import dump_yaml
from headway.config.yaml_reader import parse_yaml
from headway.errors import ConfigError, HeadwayError
from headway.runtime.heartbeat import clear_beats
from headway.runtime.json_file import load_json, read_bounded
from headway.runtime.machine import environment
from headway.runtime.process import restarted_job, supervisor
from headway.runtime.run_lock import LOCK, RunLock
from headway.runtime.storage import parse_sealed_json, sealed_json, write_atomic
from headway.runtime.temporary import clear_temporary
from headway.track.events import EVENTS, reset_crash_report
from headway.train.code_record import record_code
from headway.train.config import Recipe
from headway.train.control import on_first_rank, remove_request
from headway.train.run_name import GIVEN

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup
    from headway.tokenizer.load import Tokenizer
    from headway.train.start import Start

log = logging.getLogger("headway")

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
SAVED = "saved.json"
SUMMARY_KEYS = {"steps", "seconds", "checkpoint"}
"""Without these a summary counts as damaged: the entries of stages.json need them."""
TOKENIZER = "tokenizer"
"""Folder for a tokenizer that carries the chat template of the run's data."""
JOB = Path("logs") / "job.txt"
"""The job whose start was the newest; a restart of the same job resumes."""
FILES = (RECIPE, METRICS, SUMMARY, "train.log", EVENTS)
"""What every run writes as files."""
MAX_OLD_NAMES = 10_000
"""Numbers that are tried for a folder that is moved aside."""


@dataclass(frozen=True)
class SaveRecord:
    """The content of saved.json."""

    run: str
    """Made when the run began; every checkpoint it saves carries it."""
    step: int | None = None
    """The newest saved step; None = none yet."""


def read_save_record(folder: Path) -> SaveRecord | None:
    """The content of saved.json; None if it is missing or damaged."""
    path = folder / SAVED
    try:
        content: Any = parse_sealed_json(read_bounded(path))
        step = None
        if content["step"] is not None:
            step = int(content["step"])
        return SaveRecord(str(content["run"]), step)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        log.warning("%s is damaged (%s); the next save rewrites it", path, problem)
        return None


def write_save_record(folder: Path, record: SaveRecord) -> None:
    write_atomic(folder / SAVED, sealed_json(asdict(record)))


def clear_save_record(folder: Path) -> SaveRecord:
    """Expect no checkpoint until the next `write_save_record`.

    Call it before checkpoints are set aside. Returns the run's record.
    """
    before = read_save_record(folder)
    if before is None:
        return new_save_record()
    cleared = replace(before, step=None)
    write_save_record(folder, cleared)
    return cleared


def new_save_record() -> SaveRecord:
    return SaveRecord(uuid.uuid4().hex)


class RunLocks:
    """The locks this process holds: of the run folder and of a checkpoint folder elsewhere.

    Ranks other than the first hold none.
    """

    def __init__(self, locks: Sequence[RunLock] = ()) -> None:
        self.locks = list(locks)

    def moved(self) -> None:
        """The run folder was moved with its lock in it."""
        if self.locks:
            self.locks[0].moved()

    def check(self) -> None:
        """Refuse to continue where another process has taken over."""
        for lock in self.locks:
            lock.check()


@contextmanager
def lock_run(recipe: Recipe, world: RankGroup) -> Iterator[RunLocks]:
    """Let the first rank lock the run's folders before anything there is read or changed.

    Refuse on all ranks where they are in use.
    """
    folder = recipe.run.folder
    checkpoints, _ = recipe.checkpoint.locations(folder)
    folders = [folder]
    if not checkpoints.is_relative_to(folder):
        # Two runs may share a checkpoint folder elsewhere, and would delete each other's.
        folders.append(checkpoints)
    locks = RunLocks()

    def take() -> dict[str, Any]:
        refuse_broken_links([recipe.run.dir, *folders, checkpoints])
        for path in folders:
            lock = RunLock(path, recipe.run.takeover_seconds)
            locks.locks.append(lock)
            lock.take()
        return {}

    try:
        on_first_rank(world, take)
        yield locks
    finally:
        for lock in reversed(locks.locks):
            lock.release()


def refuse_broken_links(paths: Sequence[Path]) -> None:
    """Refuse links to nothing: a disk that is not mounted is no reason to start a new run."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"{path} is a link to {path.readlink()}, which does not exist. "
                "Mount or restore it, or remove the link."
            )


def was_used(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return any((folder / name).exists() for name in (RECIPE, METRICS, SAVED))


def unused_name(folder: Path) -> Path:
    """A free name for a run folder that is to be moved."""
    names = (folder.with_name(f"{folder.name}.old-{number}") for number in range(1, MAX_OLD_NAMES))
    return next(path for path in names if not path.exists())


def move_aside(folder: Path, target: Path) -> None:
    """Rename an existing run folder; its lock is not kept in it."""
    folder.rename(target)
    # The lock that this process holds was moved with the folder; `RunLock.moved` makes it anew.
    (target / LOCK).unlink(missing_ok=True)
    log.info("moved the existing run to %s", target)


def prepare_folder(
    start: Start,
    recipe: Recipe,
    moved: Callable[[], None] = lambda: None,
    original_recipe: Recipe | None = None,
) -> None:
    """Make the folder and write what describes the run.

    `moved` is called at once after an older run was moved.

    `original_recipe` is the recipe before model and data were read: a later start compares its own
    with it to find the folder of the same settings.
    """
    if start.set_aside is not None:
        move_aside(start.folder, start.set_aside)
        moved()

    local, remote_location = recipe.checkpoint.locations(start.folder)
    remote = None
    if remote_location is not None:
        from headway.checkpoint.remote import RemoteCheckpoints

        remote = RemoteCheckpoints(remote_location, recipe.checkpoint)
    if links := restore_links(local):
        log.warning(
            "%s: %s were folders, as a copy that follows links leaves them, "
            "and no save could have replaced them; they are links again",
            local,
            ", ".join(links),
        )

    # Later checkpoints are of steps that this start will train once more. saved.json is cleared
    # before they move: a crash in between must not look as if they were lost.
    saved = new_save_record()
    if start.checkpoint is not None or start.from_scratch:
        saved = clear_save_record(start.folder)
        step = -1
        if start.checkpoint is not None:
            step = start.checkpoint.step
        moved_checkpoints = [*set_aside_later(local, step)]
        if remote is not None:
            moved_checkpoints += remote.set_aside_later(step)
        for checkpoint in moved_checkpoints:
            log.info("set a later checkpoint aside: %s", checkpoint)

    begin_in(start.folder)
    record_code(start.folder, recipe)
    write_atomic(start.folder / RECIPE, dump_yaml(recipe))
    if original_recipe is not None:
        write_atomic(start.folder / GIVEN, dump_yaml(original_recipe, only_given=True))

    # A checkpoint of this run's own folders is its newest save. One from elsewhere (--resume PATH)
    # belongs to another run.
    if start.checkpoint is not None and start.checkpoint.path.parent in (
        local.resolve(),
        remote_location,
    ):
        saved = replace(saved, run=start.checkpoint.run or saved.run, step=start.checkpoint.step)
    write_save_record(start.folder, saved)
    if remote is not None:
        remote.store.write(remote.location / RECIPE, dump_yaml(recipe).encode())


def begin_in(folder: Path) -> None:
    """Make a run folder and record this start.

    What an earlier start left for others to read goes: heartbeats, crash reports, requests.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    job, _ = restarted_job()
    if job is not None:
        write_atomic(folder / JOB, job)

    clear_temporary(folder)
    clear_temporary(logs)
    clear_beats(folder)
    reset_crash_report(folder)
    if supervisor() is None:
        # A stop request of an earlier start. Under a supervisor it may be for this one.
        remove_request(folder)
    _record_start(folder)


def _record_start(folder: Path) -> None:
    """Write command and environment of this start to the run folder and to logs/starts/NUMBER."""
    starts = folder / "logs" / "starts"
    starts.mkdir(exist_ok=True)
    earlier = [int(path.name) for path in starts.iterdir() if path.name.isdecimal()]
    this_start = starts / f"{max(earlier, default=0) + 1:04}"
    this_start.mkdir()
    facts = environment()
    for directory in (this_start, folder):
        write_atomic(directory / "command.txt", shlex.join(sys.argv) + "\n")
        write_json(directory / "environment.json", facts)


def save_tokenizer(folder: Path, recipe: Recipe, tokenizer: Tokenizer) -> Path | None:
    """Save the tokenizer with the chat template of the training data, for checkpoints and final/.

    None where it needs no other template.

    Users of the trained model then prompt it in the form it was trained on.
    """
    from headway.records.base import record_kind
    from headway.tokenizer.chat import TOKENIZER_TEMPLATE, find_template

    # Plain text has no turns and says nothing about a template.
    names = {
        source.chat_template
        for source in recipe.data.train or ()
        if source.kind == "auto" or not record_kind(source.kind).is_text
    }
    # Trained on several templates, a model has no one form that it should be prompted in.
    if len(names) != 1 or TOKENIZER_TEMPLATE in names:
        return None

    (name,) = names
    # None where no text would be read back as the tokens of the template.
    template = find_template(name, tokenizer).export(tokenizer)
    if template is None or template == tokenizer.chat_template:
        return None
    tokenizer.with_chat_template(template).save(folder / TOKENIZER)
    replaced = ", replacing its own" if tokenizer.chat_template is not None else ""
    log.info("the tokenizer of checkpoints and final/ gets the chat template %s%s", name, replaced)
    return folder / TOKENIZER


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary.json of a finished run.

    None if it is missing, or damaged and must be rewritten.
    """
    try:
        summary: Any = load_json(folder / SUMMARY)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or not SUMMARY_KEYS.issubset(summary):
        return None
    return summary


def read_sparsity_target(model: Path) -> float | None:
    """The share of streaming heads that a run trained its gates for; None where the path is no run,
    or it did not say."""
    try:
        recipe: Any = parse_yaml(read_bounded(model / RECIPE).decode(), RECIPE)
        target = recipe["objective"]["target"]
    except (OSError, HeadwayError, UnicodeDecodeError, KeyError, TypeError):
        return None
    if not isinstance(target, int | float):
        return None
    return float(target)


def write_json(path: Path, content: Any) -> None:
    """Write a small JSON file, whole or not at all."""
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")

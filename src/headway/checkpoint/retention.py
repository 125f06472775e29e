"""Which checkpoints are kept: the newest complete ones, the best ones, those kept forever, two
snapshots, and every link target.

Nothing is deleted before enough newer checkpoints are known to be complete.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.best import VALID, ManifestCache, metric_value
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import Reader, step_folders, step_of
from headway.checkpoint.manifest import MANIFEST, ManifestSummary
from headway.checkpoint.save import LATEST, REPLACED_PREFIX, STEP_FOLDER, step_folder
from headway.errors import CheckpointError
from headway.runtime.json_file import read_bounded
from headway.runtime.storage import link_atomic, remove_folder, rename_folder, writing

SET_ASIDE_PREFIX = "set-aside-"
BEST_LINK = re.compile(r"best-(\d+)")
SNAPSHOTS_KEPT = 2
"""Two, so that one is whole while the next is written."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint or snapshot, on disk or in S3."""

    name: str
    step: int
    is_snapshot: bool
    is_whole: bool
    value: float | None
    """The value of its validation metric."""
    run: str = ""
    """The run that saved it; empty where it does not say."""

    @classmethod
    def of(cls, name: str, reader: Reader | ManifestSummary | None, metric: str) -> Entry:
        """From an open checkpoint or a manifest summary; None means that it cannot be read."""
        match = STEP_FOLDER.fullmatch(name.removeprefix(REPLACED_PREFIX))
        assert match is not None
        step = int(match.group(2))
        is_snapshot = match.group(1) == "snapshot"
        if reader is None:
            return cls(name, step, is_snapshot, is_whole=False, value=None)

        valid: Any = reader.scalars.get(VALID)
        return cls(
            name,
            step,
            is_snapshot,
            is_whole=True,
            value=metric_value(valid, metric),
            run=reader.run,
        )


@dataclass(frozen=True)
class RunScope:
    """The checkpoints a run may count and delete: not those of other runs, nor of steps it has not
    reached.
    """

    run: str = ""
    step: int | None = None

    def has(self, entry: Entry) -> bool:
        """Whether an entry belongs to the run."""
        is_same_run = not self.run or entry.run in ("", self.run)
        is_reached = self.step is None or entry.step <= self.step
        return is_same_run and is_reached


def choose(
    entries: Sequence[Entry], config: CheckpointConfig, scope: RunScope = RunScope()
) -> tuple[list[str], list[str]]:
    """The names of the best, best first, and of those to delete."""
    entries = sorted((entry for entry in entries if scope.has(entry)), key=lambda entry: entry.step)
    full = [entry for entry in entries if not entry.is_snapshot]
    snapshots = [entry for entry in entries if entry.is_snapshot]

    # Of equal values the earlier step is better: the later ones bought nothing.
    sign = -1.0 if config.higher_is_better else 1.0
    ranked = sorted(
        (sign * entry.value, entry.step, entry.name)
        for entry in full
        if entry.is_whole and entry.value is not None
    )
    best = [name for _, _, name in ranked[: config.keep_best]]

    unneeded = [entry for entry in _older_than(full, config.keep_last) if entry.name not in best]
    if config.keep_every:
        unneeded = [entry for entry in unneeded if entry.step % config.keep_every]
    unneeded += _older_than(snapshots, SNAPSHOTS_KEPT)
    return best, [entry.name for entry in unneeded]


def _older_than(entries: list[Entry], keep: int) -> list[Entry]:
    """All entries older than the newest `keep` complete ones; a damaged one does not count."""
    older = list(entries)
    num_complete = 0
    while older and num_complete < keep:
        num_complete += older.pop().is_whole
    return older


def retain(
    checkpoints: Path,
    config: CheckpointConfig,
    scope: RunScope = RunScope(),
    manifests: ManifestCache | None = None,
    needed: Collection[str] = (),
) -> list[Path]:
    """Link best-1, best-2, ... to the best, delete what is not kept, and return what was deleted.

    `needed` names stay.
    """
    folders = _all_folders(checkpoints)
    summaries = (manifests or ManifestCache()).of(folders)
    entries = [
        Entry.of(path.name, summary, config.metric)
        for path, summary in zip(folders, summaries, strict=True)
    ]
    best, unneeded = choose(entries, config, scope)

    # Links move first: from here on none of them points to what is deleted. Links that a user
    # made count as well.
    _link_best(checkpoints, best)
    linked = {path.resolve() for path in checkpoints.iterdir() if path.is_symlink()}

    removed: list[Path] = []
    for name in unneeded:
        path = checkpoints / name
        if name in needed or path.resolve() in linked:
            continue
        with writing(path, error=CheckpointError):
            remove_folder(path)
        removed.append(path)
    return removed


def _all_folders(checkpoints: Path) -> list[Path]:
    """Checkpoints and snapshots, oldest first.

    Unlike `step_folders`, which gives one folder a step, this has also the snapshot of a step that
    has a checkpoint: it is to be deleted one day.
    """
    folders = step_folders(checkpoints, snapshots=False)
    for path in checkpoints.glob("snapshot-*"):
        if STEP_FOLDER.fullmatch(path.name):
            folders.append(path)
    return sorted(folders, key=step_of)


def _link_best(checkpoints: Path, best: list[str]) -> None:
    wanted = {f"best-{number}": name for number, name in enumerate(best, 1)}
    for path in checkpoints.iterdir():
        if BEST_LINK.fullmatch(path.name) and path.is_symlink() and path.name not in wanted:
            path.unlink()
    for name, target in wanted.items():
        link = checkpoints / name
        if not link.is_symlink() or str(link.readlink()) != target:
            with writing(link, error=CheckpointError):
                link_atomic(link, target)


def restore_links(checkpoints: Path) -> list[str]:
    """Make `latest` and `best-N` links again where they are folders; returns their names.

    Copying a run with links followed makes copies of checkpoints of them. No link can take the
    place of a folder, so every save would fail.
    """
    if not checkpoints.is_dir():
        return []
    restored: list[str] = []
    for path in sorted(checkpoints.iterdir()):
        is_link_name = path.name == LATEST or BEST_LINK.fullmatch(path.name) is not None
        if not is_link_name or path.is_symlink() or not path.is_dir():
            continue
        with writing(path, error=CheckpointError):
            _restore_link(path)
        restored.append(path.name)
    return restored


def _restore_link(path: Path) -> None:
    """Link to the checkpoint of which this folder is a copy.

    Without that one, the copy becomes it; what is neither is set aside.
    """
    try:
        step = Reader(path).step
        content = read_bounded(path / MANIFEST)
    except (CheckpointError, OSError):
        rename_folder(path, _aside_name(path))
        return

    # Equal manifests mean equal checkpoints: a manifest has the checksums of all bytes.
    original = step_folder(path.parent, step)
    for candidate in (original, step_folder(path.parent, step, snapshot=True)):
        if (candidate / MANIFEST).is_file() and (candidate / MANIFEST).read_bytes() == content:
            remove_folder(path)
            link_atomic(path, candidate.name)
            return

    if original.exists():
        rename_folder(path, _aside_name(path))
        return
    rename_folder(path, original)
    link_atomic(path, original.name)


def _aside_name(path: Path) -> Path:
    """A free name for a folder that is to be set aside."""
    target = path.with_name(f"{SET_ASIDE_PREFIX}{path.name}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{SET_ASIDE_PREFIX}{path.name}-{number}")
    return target


def set_aside_later(checkpoints: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`: a run that continues from `step` writes its own
    and must not resume from these.
    """
    later = [path for path in step_folders(checkpoints) if step_of(path) > step]
    if not later:
        return []

    aside: list[Path] = []
    for path in later:
        target = _aside_name(path)
        with writing(path, error=CheckpointError):
            rename_folder(path, target)
        aside.append(target)

    # `latest` and `best-N` may point to folders that have just lost their names.
    latest = checkpoints / LATEST
    current = [path for path in step_folders(checkpoints) if step_of(path) == step]
    with writing(latest, error=CheckpointError):
        if current:
            link_atomic(latest, current[0].name)
        else:
            latest.unlink(missing_ok=True)
        for path in checkpoints.iterdir():
            if BEST_LINK.fullmatch(path.name) and not path.exists():
                path.unlink()
    return aside

"""Which checkpoints are kept: the newest complete ones, the best ones, those kept forever, two snapshots, and every link target.

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
        valid: Any = None if reader is None else reader.scalars.get(VALID)
        return cls(
            name,
            int(match.group(2)),
            match.group(1) == "snapshot",
            reader is not None,
            metric_value(valid, metric),
            "" if reader is None else reader.run,
        )


@dataclass(frozen=True)
class RunScope:
    """The checkpoints a run may count and delete: not those of other runs, nor of steps it has not reached."""

    run: str = ""
    step: int | None = None

    def has(self, entry: Entry) -> bool:
        """Whether an entry belongs to the run."""
        same = not self.run or entry.run in ("", self.run)
        return same and (self.step is None or entry.step <= self.step)


def choose(
    entries: Sequence[Entry], config: CheckpointConfig, own: RunScope = RunScope()
) -> tuple[list[str], list[str]]:
    """The names of the best, best first, and of those to delete."""
    entries = [one for one in entries if own.has(one)]
    full = sorted((one for one in entries if not one.is_snapshot), key=lambda one: one.step)
    snapshots = sorted((one for one in entries if one.is_snapshot), key=lambda one: one.step)
    sign = -1.0 if config.higher_is_better else 1.0
    ranked = sorted(
        (sign * one.value, one.step, one.name)
        for one in full
        if one.is_whole and one.value is not None
    )
    best = [name for _, _, name in ranked[: config.keep_best]]
    older = [one for one in _older_than(full, config.keep_last) if one.name not in best]
    if config.keep_every:
        older = [one for one in older if one.step % config.keep_every]
    return best, [one.name for one in [*older, *_older_than(snapshots, SNAPSHOTS_KEPT)]]


def _older_than(entries: list[Entry], keep: int) -> list[Entry]:
    """All entries older than the newest `keep` complete ones."""
    left, kept = list(entries), 0
    while left and kept < keep:
        kept += left.pop().is_whole
    return left


def retain(
    checkpoints: Path,
    config: CheckpointConfig,
    own: RunScope = RunScope(),
    manifests: ManifestCache | None = None,
    needed: Collection[str] = (),
) -> list[Path]:
    """Link best-1, best-2, ... to the best, delete what is not kept, and return what was deleted. `needed` names stay."""
    folders = _all_folders(checkpoints)
    found = (manifests or ManifestCache()).of(folders)
    best, unneeded = choose(
        [
            Entry.of(path.name, head, config.metric)
            for path, head in zip(folders, found, strict=True)
        ],
        config,
        own,
    )
    _link_best(checkpoints, best)
    linked = {path.resolve() for path in checkpoints.iterdir() if path.is_symlink()}
    doomed = [
        path
        for name in unneeded
        if name not in needed and (path := checkpoints / name).resolve() not in linked
    ]
    for path in doomed:
        with writing(path, error=CheckpointError):
            remove_folder(path)
    return doomed


def _all_folders(checkpoints: Path) -> list[Path]:
    """Checkpoints and snapshots, oldest first."""
    full = step_folders(checkpoints, snapshots=False)
    return sorted(
        [
            *full,
            *(path for path in checkpoints.glob("snapshot-*") if STEP_FOLDER.fullmatch(path.name)),
        ],
        key=step_of,
    )


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

    Copying a run with links followed makes copies of checkpoints of them. No link can take the place of a folder, so every save would fail.
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
    """Link to the checkpoint of which this folder is a copy. Without that one, the copy becomes it; what is neither is set aside."""
    try:
        step = Reader(path).step
        content = read_bounded(path / MANIFEST)
    except (CheckpointError, OSError):
        rename_folder(path, _aside_name(path))
        return
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
    """Rename the checkpoints of steps after `step`: a run that continues from `step` writes its own and must not resume from these."""
    later = [path for path in step_folders(checkpoints) if step_of(path) > step]
    aside: list[Path] = []
    for path in later:
        target = _aside_name(path)
        with writing(path, error=CheckpointError):
            rename_folder(path, target)
        aside.append(target)
    if later:
        latest = checkpoints / LATEST
        here = [path for path in step_folders(checkpoints) if step_of(path) == step]
        with writing(latest, error=CheckpointError):
            if here:
                link_atomic(latest, here[0].name)
            else:
                latest.unlink(missing_ok=True)
            for path in checkpoints.iterdir():
                if BEST_LINK.fullmatch(path.name) and not path.exists():
                    path.unlink()
    return aside

"""Which checkpoints stay: the newest whole ones, the best ones, those kept for good, two snapshots, and whatever a link points at.

Nothing goes before as many newer ones as should stay are known to be whole.
"""

import re
from pathlib import Path

from headway.checkpoint.best import best_checkpoints
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import open_checkpoint, step_folders, step_of
from headway.checkpoint.save import LATEST
from headway.errors import CheckpointError
from headway.runtime.storage import link_atomic, remove_folder, rename_folder, writing

SET_ASIDE_PREFIX = "set-aside-"
BEST_LINK = re.compile(r"best-(\d+)")
SNAPSHOTS_KEPT = 2


def retain(checkpoints: Path, config: CheckpointConfig) -> list[Path]:
    """Point best-1, best-2, ... at the best, delete what need not stay, and return what was deleted."""
    folders = step_folders(checkpoints, snapshots=False)
    snapshots = [path for path in step_folders(checkpoints) if path not in folders]
    link_best(checkpoints, config)
    linked = {path.resolve() for path in checkpoints.iterdir() if path.is_symlink()}
    doomed = [
        path
        for path in [*_older_than(folders, config.keep_last), *_older_than(snapshots, SNAPSHOTS_KEPT)]
        if path.resolve() not in linked and not (path in folders and config.keep_every and step_of(path) % config.keep_every == 0)
    ]
    for path in doomed:
        with writing(path, error=CheckpointError):
            remove_folder(path)
    return doomed


def link_best(checkpoints: Path, config: CheckpointConfig) -> None:
    """Make the links best-1 ... best-N right."""
    best = best_checkpoints(checkpoints, config)[: config.keep_best]
    wanted = {f"best-{place}": one.path.name for place, one in enumerate(best, 1)}
    for path in checkpoints.iterdir():
        if BEST_LINK.fullmatch(path.name) and path.is_symlink() and path.name not in wanted:
            path.unlink()
    for name, target in wanted.items():
        link = checkpoints / name
        if not link.is_symlink() or str(link.readlink()) != target:
            with writing(link, error=CheckpointError):
                link_atomic(link, target)


def _older_than(folders: list[Path], keep: int) -> list[Path]:
    """All but the newest `keep` whole ones and what is newer than those."""
    left = list(folders)
    kept = 0
    while left and kept < keep:
        kept += _is_whole(left.pop())
    return left


def _is_whole(path: Path) -> bool:
    """Manifest, sizes and coverage are right; the bytes are not read."""
    try:
        open_checkpoint(path).verify(deep=False)
    except CheckpointError:
        return False
    return True


def set_aside_later(checkpoints: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`: a run that goes on from there makes its own, and must not find theirs newest."""
    later = [path for path in step_folders(checkpoints) if step_of(path) > step]
    aside: list[Path] = []
    for path in later:
        number = 1
        while (target := path.with_name(f"{SET_ASIDE_PREFIX}{path.name}" + (f"-{number}" if number > 1 else ""))).exists():
            number += 1
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

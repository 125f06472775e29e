"""Which checkpoints stay: the newest whole ones, and whatever a link in the folder points at.

Nothing goes before as many newer ones as should stay are known to be whole.
"""

from pathlib import Path

from headway.checkpoint.load import open_checkpoint, step_folders
from headway.checkpoint.save import LATEST, STEP_FOLDER, step_folder
from headway.errors import CheckpointError
from headway.runtime.storage import link_atomic, remove_folder, rename_folder, writing

SET_ASIDE_PREFIX = "set-aside-"


def retain(checkpoints: Path, keep_last: int) -> list[Path]:
    """Keep the newest `keep_last` checkpoints that are whole, delete what is older than those, and return what was deleted."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least one checkpoint must stay")
    folders = step_folders(checkpoints)
    kept = 0
    while folders and kept < keep_last:
        kept += _is_whole(folders.pop())
    linked = {path.resolve() for path in checkpoints.iterdir() if path.is_symlink()} if folders else set[Path]()
    doomed = [path for path in folders if path.resolve() not in linked]
    for path in doomed:
        with writing(path, error=CheckpointError):
            remove_folder(path)
    return doomed


def _is_whole(path: Path) -> bool:
    """Manifest, sizes and coverage are right; the bytes are not read."""
    try:
        open_checkpoint(path).verify(deep=False)
    except CheckpointError:
        return False
    return True


def set_aside_later(checkpoints: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`: a run that goes on from there makes its own, and must not find theirs newest."""
    later = [path for path in step_folders(checkpoints) if int(STEP_FOLDER.findall(path.name)[0]) > step]
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
        with writing(latest, error=CheckpointError):
            if step_folder(checkpoints, step).is_dir():
                link_atomic(latest, step_folder(checkpoints, step).name)
            else:
                latest.unlink(missing_ok=True)
    return aside

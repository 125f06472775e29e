"""Which checkpoints stay: the newest ones, and whatever a link in the folder points at.

Nothing goes before the newest is known to be whole.
"""

from pathlib import Path

from headway.checkpoint.load import open_checkpoint, step_folders
from headway.errors import CheckpointError
from headway.runtime.storage import remove_folder, writing


def retain(checkpoints: Path, keep_last: int) -> list[Path]:
    """Delete all but the newest `keep_last` checkpoints and return what was deleted. A newest one that is not whole is an error."""
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least one checkpoint must stay")
    folders = step_folders(checkpoints)
    if len(folders) <= keep_last:
        return []
    open_checkpoint(folders[-1]).verify(deep=False)
    linked = {path.resolve() for path in checkpoints.iterdir() if path.is_symlink()}
    doomed = [path for path in folders[:-keep_last] if path.resolve() not in linked]
    for path in doomed:
        with writing(path, error=CheckpointError):
            remove_folder(path)
    return doomed

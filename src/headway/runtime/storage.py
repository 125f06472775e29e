"""Bytes reach the disk whole or not at all: temporary name, fsync, rename, fsync of the folder.

In: a path and bytes. A failure (a full disk, a folder without permission) is one line that names
the path. A sealed file holds its own checksum, so that a change on the disk is noticed when it is
read:

    bytes   headway-sealed <sha256 of the rest>\\n<content>
    JSON    {"checksum": "<sha256 of the other keys>", ...}
"""

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import ConfigError, HeadwayError, TrainingError
from headway.runtime.json_file import read_bounded
from headway.runtime.temporary import TEMPORARY_PREFIX, temporary_name

CHUNK_BYTES = 4 << 20
"""How much of a large file is in memory at a time."""
SEAL = b"headway-sealed "
SHA256_DIGITS = 64
SEAL_BYTES = len(SEAL) + SHA256_DIGITS + len(b"\n")


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a small file so that a reader sees the old content or the new, never half of it."""
    content = data.encode() if isinstance(data, str) else data
    refuse_device(path)
    temporary = temporary_name(path)
    with writing(path, len(content)):
        with open(temporary, "xb") as file:
            try:
                file.write(content)
                file.flush()
                # Before the rename: after a crash the new name must not stand for an empty file.
                fsync_file(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        # The rename itself is an entry of the folder, which reaches the disk on its own.
        fsync_folder(path.parent)


def refuse_device(path: Path) -> None:
    """Refuse to put a file in the place of a device or a pipe (/dev/null, say), which a rename
    would do.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return  # nothing there, or no name for a file: writing reports what is wrong
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(
            f"{path}: is a device or a pipe, which a file would replace. Give the name of a file."
        )


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb", opener=regular_only) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_file(descriptor: int) -> None:
    """Wait until an open file's bytes are on the disk."""
    os.fsync(descriptor)


def drop_cached(descriptor: int) -> None:
    """Ask that the next read of a file comes from the disk rather than from memory.

    A system that cannot is left alone.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_folder(path: Path) -> None:
    """Wait until a folder's entries (names, renames) are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as problem:
        # Some network file systems have no fsync for folders; they order renames themselves.
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename_folder(source: Path, target: Path) -> None:
    """Rename a folder whose files are on the disk already, and make the rename itself last.

    The target must not exist.
    """
    os.rename(source, target)
    fsync_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder.

    It first gets a temporary name, so that a half-deleted folder is never opened.
    """
    temporary = path
    if not path.name.startswith(TEMPORARY_PREFIX):
        temporary = temporary_name(path.with_name(f"removed-{path.name}"))
        os.rename(path, temporary)
    remove_tree(temporary)


def remove_tree(path: Path) -> None:
    """Delete a folder that another process may be deleting too."""
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # the other process was faster with an entry: delete what is left


def link_atomic(link: Path, target: str) -> None:
    """Point a relative symbolic link at a name in the same folder, replacing an older link in one
    step.
    """
    # A symlink cannot be created over another one, but renamed over it.
    temporary = temporary_name(link)
    os.symlink(target, temporary)
    os.replace(temporary, link)
    fsync_folder(link.parent)


def existing_ancestor(path: Path) -> Path:
    """The path itself if it exists, else the nearest folder above it that does."""
    ancestor = Path(path).absolute()
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    return ancestor


def missing_folders(path: Path) -> list[Path]:
    """The folder and those above it that do not exist yet, the innermost first."""
    return [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that were made for nothing, the innermost first.

    One that holds something stays.
    """
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def free_bytes(path: Path) -> int:
    """Bytes that can still be written where `path` is or would be."""
    return shutil.disk_usage(existing_ancestor(path)).free


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written (or created); leaves nothing behind."""
    ancestor = existing_ancestor(folder)
    if not ancestor.is_dir():
        subject = ""
        if ancestor != Path(folder).absolute():
            subject = f"{ancestor} "
        raise ConfigError(
            f"{folder}: {subject}is a file, so no folder can be made there. Choose another folder."
        )

    # Permissions alone do not tell: a full disk and a read-only mount show only in a real write.
    try:
        with tempfile.TemporaryFile(dir=ancestor) as probe:
            probe.write(b"0")
            probe.flush()
    except OSError as problem:
        raise ConfigError(f"{folder}: {explain(problem, ancestor, 1)}") from None


@contextmanager
def writing(
    path: object, needed_bytes: int | None = None, error: type[HeadwayError] = TrainingError
) -> Iterator[None]:
    """Turn any failure of the file system inside the block into one line of type `error` that names
    the path.
    """
    try:
        yield
    except OSError as problem:
        raise error(f"{path}: {explain(problem, Path(str(path)), needed_bytes)}") from problem


def require_space(path: Path, needed_bytes: int, error: type[HeadwayError] = TrainingError) -> None:
    """Refuse to begin a write that cannot end: fewer free bytes than it needs."""
    if free_bytes(path) < needed_bytes:
        raise error(f"{path}: {explain(OSError(errno.ENOSPC, ''), path, needed_bytes)}")


def explain(problem: OSError, path: Path, needed_bytes: int | None = None) -> str:
    """What an error of the file system means and what to do, without the path."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full" if problem.errno == errno.ENOSPC else "the disk quota is used up"
        needed = ""
        if needed_bytes is not None:
            needed = f"{needed_bytes} bytes needed, "
        free = free_bytes(path)
        return f"{why}: {needed}{free} bytes free. Free some space or choose another disk."
    if problem.errno in (errno.EACCES, errno.EPERM):
        return "no permission to write here. Change the permissions or choose another folder."
    if problem.errno == errno.EROFS:
        return "the file system is read-only. Choose another folder."

    other_path = ""
    if problem.filename is not None and str(problem.filename) != str(path):
        other_path = f" ({problem.filename})"
    return f"cannot be written: {problem.strerror or problem}{other_path}."


def write_sealed(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write bytes with their checksum, whole or not at all; `durable` waits for the disk."""
    sealed = _seal(content) + content
    if durable:
        write_atomic(path, sealed)
        return
    # A cache: after a crash the seal shows what is damaged, and it is computed again.
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex}")
    temporary.write_bytes(sealed)
    os.replace(temporary, path)


def read_sealed(path: Path) -> bytes | None:
    """The bytes that were written; None where there is no such file.

    Any change since is a ValueError.
    """
    try:
        sealed = read_bounded(path, sys.maxsize)
    except FileNotFoundError:
        return None
    content = sealed[SEAL_BYTES:]
    if sealed[:SEAL_BYTES] != _seal(content):
        raise ValueError("its checksum does not match")
    return content


def _seal(content: bytes) -> bytes:
    """The first line of a sealed file."""
    return SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n"


def sealed_json(values: Mapping[str, Any]) -> str:
    """JSON text of some values with their checksum."""
    return json.dumps({"checksum": _checksum(values), **values}, indent=1) + "\n"


def parse_sealed_json(text: str | bytes) -> dict[str, Any]:
    """The values of sealed JSON; any change since is a ValueError."""
    values: Any = json.loads(text)
    if not isinstance(values, dict) or values.pop("checksum", None) != _checksum(values):
        raise ValueError("its checksum does not match")
    return values


def _checksum(values: Mapping[str, Any]) -> str:
    # Sorted: an editor may save the keys in another order.
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

"""Reads checkpoints: any box of any tensor, in any layout it was written in.

Damage raises a CheckpointError that names the file.

Opening checks the manifest and the size of every file; the first read of a box checks its checksum.
Only safetensors and JSON are parsed, so a checkpoint cannot run code.
"""

from __future__ import annotations

import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.files import REMEDY, open_files
from headway.checkpoint.manifest import (
    MANIFEST,
    Json,
    StoredBox,
    StoredFile,
    parse_manifest,
    tensor_key,
)
from headway.checkpoint.save import (
    REPLACED_PREFIX,
    STEP_FOLDER,
    TOKENIZER,
    dtype_name,
    tensor_bytes,
)
from headway.errors import CheckpointError, ConfigError, ObjectStoreUnavailable
from headway.parallel.box import Box, Ints, subtract_all, uncovered
from headway.runtime.paths import AnyPath, S3Path, parse_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

LINK_BYTES = 64
"""More than the longest name of a checkpoint's folder."""
VERIFY_THREADS = 8
"""Threads of `verify` at most: hashing releases the GIL, and more would only wait for the disk."""


class Reader:
    """One open checkpoint. Tensors are read one at a time and not cached."""

    def __init__(self, path: AnyPath, *, verify: bool = True) -> None:
        self.path = path
        self._source = open_files(path)
        self._manifest = parse_manifest(path, self._source.read(MANIFEST))
        self._boxes: dict[str, list[StoredBox]] = {key: [] for key in self._manifest.shapes}
        for box in self._manifest.boxes:
            self._boxes[tensor_key(box.role, box.name)].append(box)
        self._files = {file.path: file for file in self._manifest.files}
        self._headers: dict[str, bytes] = {}

        # Boxes whose checksum is still to be compared, as (file, key). A box leaves the set when it
        # is read the first time.
        self._unverified: set[tuple[str, str]] = set()
        if verify:
            self._unverified = {(box.file, box.key) for box in self._manifest.boxes}
        self._check_sizes()

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def run(self) -> str:
        """The id of the run that saved it; empty if unknown."""
        return self._manifest.run

    @property
    def world(self) -> int:
        return self._manifest.world

    @property
    def scalars(self) -> Mapping[str, Json]:
        return self._manifest.scalars

    @property
    def tokenizer_folder(self) -> Path | None:
        """The verified folder of the tokenizer saved with the model; None if there is none."""
        files = [file for file in self._files.values() if file.path.startswith(TOKENIZER + "/")]
        for file in files:
            self._check_whole(file)
        if files:
            return self._source.folder([file.path for file in files], TOKENIZER)
        return None

    @property
    def files(self) -> list[str]:
        """The files the manifest lists."""
        return list(self._files)

    def check_file(self, name: str) -> None:
        """Check size and checksum of one file.

        Where the boxes have their own checksums, only the header is hashed.
        """
        file = self._files[name]
        self._check_size(file)
        self._check_whole(file)
        if file.sha256_header is not None:
            self._header(name)

    def names(self, role: str | None = None) -> list[str]:
        """The names of all tensors, or of those that have a role."""
        pairs = (key.split(":", 1) for key in self._boxes)
        names = (name for stored_role, name in pairs if role in (None, stored_role))
        return list(dict.fromkeys(names))

    def roles(self, name: str) -> list[str]:
        """The roles a tensor is stored in."""
        pairs = (key.split(":", 1) for key in self._boxes)
        return [role for role, stored_name in pairs if stored_name == name]

    def shape(self, name: str, role: str | None = None) -> Ints:
        """The global shape of a tensor in a role (default: its weights, else its first role)."""
        if role is None:
            # A name that is not stored gets "param": `_stored_key` then raises the right error.
            roles = self.roles(name) or ["param"]
            weights = [weight for weight in ("master", "param") if weight in roles]
            role = (weights or roles)[0]
        return self._manifest.shapes[self._stored_key(name, role)]

    def dtype(self, name: str, role: str) -> torch.dtype:
        """The element type of a stored tensor."""
        import torch

        return getattr(torch, self._dtype(self._stored_key(name, role)))

    def weight(
        self, name: str, offset: Ints | None = None, shape: Ints | None = None
    ) -> torch.Tensor:
        """The weights of a parameter: the fp32 master copy if there is one."""
        role = "master" if "master" in self.roles(name) else "param"
        return self.read(name, role, offset, shape)

    def read(
        self, name: str, role: str, offset: Ints | None = None, shape: Ints | None = None
    ) -> torch.Tensor:
        """A tensor, or its part at `offset` of `shape`, on the host in its stored dtype.

        Missing elements are an error.
        """
        import torch

        key = self._stored_key(name, role)
        whole = self._manifest.shapes[key]
        if shape is None:
            shape = whole
        region = Box(offset or (0,) * len(whole), tuple(shape))
        if len(region.offset) != len(whole) or len(region.shape) != len(whole):
            raise ValueError(
                f"{key} has {len(whole)} dims; offset {region.offset} and shape {region.shape} do "
                "not fit"
            )

        # `missing` starts as the whole region and loses what each stored box covers. A box that
        # adds nothing new is not loaded: ranks may have stored the same elements.
        result = torch.empty(region.shape, dtype=getattr(torch, self._dtype(key)))
        missing = uncovered(region, ())
        for box in self._boxes[key]:
            remaining = subtract_all(missing, box.span)
            if remaining != missing:
                part = region.intersect(box.span)
                assert part is not None
                result[part.slices(region.offset)] = self._load(box)[part.slices(box.offset)]
                missing = remaining
        self._require_covered(key, missing)
        return result

    def verify(self, deep: bool = True) -> None:
        """Check files and coverage; `deep` also hashes every byte.

        Raises a CheckpointError that names the damage.
        """
        self._check_sizes()
        for key, boxes in self._boxes.items():
            shape = self._manifest.shapes[key]
            self._dtype(key)  # raises if the boxes disagree
            whole = Box((0,) * len(shape), shape)
            self._require_covered(key, uncovered(whole, (box.span for box in boxes)))
        if not deep:
            return

        for file in self._files.values():
            self._check_whole(file)
        # Every box again, also those that were read and checked before.
        self._unverified = {(box.file, box.key) for box in self._manifest.boxes}
        with ThreadPoolExecutor(min(VERIFY_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(self._load, self._manifest.boxes))

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._source = open_files(self.path)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_covered(self, key: str, missing: list[Box]) -> None:
        """Refuse a tensor of which stored boxes leave `missing` open."""
        if missing:
            raise CheckpointError(
                f"{self.path}: {key} lacks elements {list(missing[0].offset)} + "
                f"{list(missing[0].shape)}. {REMEDY}"
            )

    def _stored_key(self, name: str, role: str) -> str:
        """The key of a stored tensor."""
        key = tensor_key(role, name)
        if key not in self._boxes:
            has = ", ".join(self.roles(name)) or "nothing"
            raise CheckpointError(
                f"{self.path}: holds no {role} of {name} (it holds {has}). {REMEDY}"
            )
        return key

    def _dtype(self, key: str) -> str:
        dtypes = sorted({box.dtype for box in self._boxes[key]})
        if len(dtypes) != 1:
            raise CheckpointError(
                f"{self.path}: the boxes of {key} have the dtypes {', '.join(dtypes) or 'none'}; "
                f"they must share one. {REMEDY}"
            )
        return dtypes[0]

    def _check_sizes(self) -> None:
        for file in self._files.values():
            self._check_size(file)

    def _check_size(self, file: StoredFile) -> None:
        size = self._source.size(file.path)
        if size != file.size:
            raise CheckpointError(
                f"{self.path / file.path}: has {size} bytes; {file.size} were written. {REMEDY}"
            )

    def _check_whole(self, file: StoredFile) -> None:
        if file.sha256 is not None and self._source.sha256(file.path) != file.sha256:
            raise CheckpointError(
                f"{self.path / file.path}: damaged: its checksum does not match. {REMEDY}"
            )

    def _header(self, name: str) -> bytes:
        """The header of a file, verified before it is parsed."""
        if name not in self._headers:
            header = self._source.header(name, self._files[name].size)
            if hashlib.sha256(header).hexdigest() != self._files[name].sha256_header:
                raise CheckpointError(
                    f"{self.path / name}: damaged: its header's checksum does not match. {REMEDY}"
                )
            self._headers[name] = header
        return self._headers[name]

    def _load(self, box: StoredBox) -> torch.Tensor:
        """A stored box, compared with the manifest, and with its checksum if it was not yet."""
        path = self.path / box.file
        tensor = self._source.tensor(box.file, box.key, self._header(box.file))
        if tuple(tensor.shape) != box.shape or dtype_name(tensor) != box.dtype:
            raise CheckpointError(
                f"{path}: {box.key} differs in shape or dtype from the manifest. {REMEDY}"
            )
        if (box.file, box.key) in self._unverified:
            if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != box.sha256:
                raise CheckpointError(
                    f"{path}: damaged: the checksum of {box.key} does not match. {REMEDY}"
                )
            self._unverified.discard((box.file, box.key))
        return tensor


def open_checkpoint(path: AnyPath | str, *, verify: bool = True) -> Reader:
    """Open one checkpoint: a folder (links such as `latest` are followed) or an S3 path."""
    location = parse_path(path)
    if isinstance(location, Path):
        # A link may be moved to a newer checkpoint while this one is being read.
        location = location.resolve()
    return Reader(location, verify=verify)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest complete checkpoint, open and verified, and the newer ones that were rejected,
    each with the reason.
    """

    path: AnyPath | None = None
    reader: Reader | None = None
    rejected: list[tuple[AnyPath, str]] = field(default_factory=list)


def newest_good(checkpoints: AnyPath, run: str = "") -> FoundCheckpoint:
    """The newest checkpoint that verifies: every byte on disk, every size in S3 (boxes are checked
    when they are read).

    A checkpoint of another run than `run` is rejected.
    """
    rejected: list[tuple[AnyPath, str]] = []
    is_remote = isinstance(checkpoints, S3Path)
    folders: Sequence[AnyPath]
    if isinstance(checkpoints, S3Path):
        folders = remote_folders(checkpoints)
    else:
        folders = step_folders(checkpoints)

    for path in reversed(folders):
        try:
            reader = open_checkpoint(path)
            if run and reader.run not in ("", run):
                raise CheckpointError(f"{path}: was saved by another run.")
            reader.verify(deep=not is_remote)
        except ObjectStoreUnavailable:
            # This checkpoint may be good: falling back to an older one would lose steps.
            raise
        except CheckpointError as problem:
            rejected.append((path, str(problem)))
        else:
            return FoundCheckpoint(path, reader, rejected)
    return FoundCheckpoint(rejected=rejected)


def remote_folders(checkpoints: S3Path) -> list[S3Path]:
    """The checkpoints and snapshots below an S3 path that have a manifest, oldest first."""
    from headway.runtime.s3 import S3

    names = complete_names(S3(checkpoints.endpoint).sizes(checkpoints))
    name_by_step: dict[int, str] = {}
    for name in sorted(names):  # `snapshot-N` sorts before `step-N`, which wins
        match = STEP_FOLDER.fullmatch(name)
        if match:
            name_by_step[int(match.group(2))] = name
    return [checkpoints / name_by_step[step] for step in sorted(name_by_step)]


def complete_names(objects: Iterable[str]) -> list[str]:
    """The folders that have a manifest, among the names of a store's objects."""
    return [
        name.split("/")[0]
        for name in objects
        if name.endswith("/" + MANIFEST) and name.count("/") == 1
    ]


def step_folders(checkpoints: Path, *, snapshots: bool = True) -> list[Path]:
    """The checkpoints of a run, and its snapshots, oldest first.

    One whose replacement never came counts too.
    """
    if not checkpoints.is_dir():
        return []
    folder_by_step: dict[int, Path] = {}
    # `.replaced-step-N` and `snapshot-N` sort before `step-N`, which wins.
    for path in sorted(checkpoints.iterdir()):
        match = STEP_FOLDER.fullmatch(path.name.removeprefix(REPLACED_PREFIX))
        if match and path.is_dir() and (snapshots or match.group(1) == "step"):
            folder_by_step[int(match.group(2))] = path
    return [folder_by_step[step] for step in sorted(folder_by_step)]


def step_of(path: AnyPath) -> int:
    """The step in the name of a checkpoint's folder."""
    match = STEP_FOLDER.fullmatch(path.name.removeprefix(REPLACED_PREFIX))
    assert match is not None
    return int(match.group(2))


def locate(path: AnyPath | str) -> AnyPath:
    """The checkpoint that a path means: a checkpoint itself, or the newest good one of a run or
    checkpoints folder.
    """
    location = parse_path(path)
    if open_files(location).read(MANIFEST) is not None:
        return location

    folder = location
    if isinstance(location, S3Path):
        # `latest` and `best-N` are objects in a store that hold the name of their target. Whatever
        # else the object is, only the length of such a name is looked at.
        content = open_files(location.parent).read(location.name) or b""
        target = content[:LINK_BYTES].decode(errors="replace")
        if STEP_FOLDER.fullmatch(target):
            return location.parent / target
    elif (location / "checkpoints").is_dir():
        folder = location / "checkpoints"

    newest = newest_good(folder)
    for _, reason in newest.rejected:
        logging.getLogger("headway").warning("%s", reason)
    if newest.path is None:
        remedy = "Give a run folder or a folder such as runs/NAME/checkpoints/latest."
        if not newest.rejected:
            raise ConfigError(f"{path}: there is no checkpoint and no model. {remedy}")
        raise CheckpointError(f"{path}: holds no good checkpoint. {remedy}")
    return newest.path

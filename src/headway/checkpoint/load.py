"""Reads checkpoints: any box of any tensor, in any layout it was written in. Damage raises a CheckpointError that names the file.

Opening checks the manifest and the size of every file; the first read of a box checks its checksum. Only safetensors and JSON are parsed,
so a checkpoint cannot run code.
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
from headway.errors import CheckpointError, ConfigError
from headway.parallel.box import Box, Ints, subtract_all, uncovered
from headway.runtime.paths import AnyPath, S3Path, parse_path
from headway.runtime.s3 import S3, StoreDown

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


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
        self._unverified = (
            {(box.file, box.key) for box in self._manifest.boxes}
            if verify
            else set[tuple[str, str]]()
        )
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
        return self._source.folder([file.path for file in files], TOKENIZER) if files else None

    @property
    def files(self) -> list[str]:
        """The files the manifest lists."""
        return list(self._files)

    def check_file(self, name: str) -> None:
        """Check size and checksum of one file; of its header only, where the boxes have their own checksums."""
        file = self._files[name]
        self._check_size(file)
        self._check_whole(file)
        if file.sha256_header is not None:
            self._header(name)

    def names(self, role: str | None = None) -> list[str]:
        """The names of all tensors, or of those that have a role."""
        pairs = (key.split(":", 1) for key in self._boxes)
        return list(dict.fromkeys(name for here, name in pairs if role in (None, here)))

    def roles(self, name: str) -> list[str]:
        """The roles a tensor is stored in."""
        return [role for role, here in (key.split(":", 1) for key in self._boxes) if here == name]

    def shape(self, name: str, role: str | None = None) -> Ints:
        """The global shape of a tensor in a role (default: its weights, else its first role)."""
        roles = self.roles(name)
        first = next(
            (weight for weight in ("master", "param") if weight in roles),
            roles[0] if roles else "param",
        )
        return self._manifest.shapes[self._known(name, role or first)]

    def dtype(self, name: str, role: str) -> torch.dtype:
        """The element type of a stored tensor."""
        import torch

        return getattr(torch, self._dtype(self._known(name, role)))

    def weight(
        self, name: str, offset: Ints | None = None, shape: Ints | None = None
    ) -> torch.Tensor:
        """The weights of a parameter: the fp32 master copy if there is one."""
        return self.read(name, "master" if "master" in self.roles(name) else "param", offset, shape)

    def read(
        self, name: str, role: str, offset: Ints | None = None, shape: Ints | None = None
    ) -> torch.Tensor:
        """A tensor, or its part at `offset` of `shape`, on the host in its stored dtype. Missing elements are an error."""
        import torch

        key = self._known(name, role)
        whole = self._manifest.shapes[key]
        region = Box(offset or (0,) * len(whole), tuple(whole) if shape is None else tuple(shape))
        if len(region.offset) != len(whole) or len(region.shape) != len(whole):
            raise ValueError(
                f"{key} has {len(whole)} dims; offset {region.offset} and shape {region.shape} do not fit"
            )
        result = torch.empty(region.shape, dtype=getattr(torch, self._dtype(key)))
        left = [] if region.is_empty else [region]
        for box in self._boxes[key]:
            remaining = subtract_all(left, box.span)
            if remaining != left:
                part = region.intersect(box.span)
                assert part is not None
                result[part.slices(region.offset)] = self._load(box)[part.slices(box.offset)]
                left = remaining
        if left:
            raise CheckpointError(
                f"{self.path}: {key} lacks elements {list(left[0].offset)} + {list(left[0].shape)}. {REMEDY}"
            )
        return result

    def verify(self, deep: bool = True) -> None:
        """Check files and coverage; `deep` also hashes every byte. Raises a CheckpointError that names the damage."""
        self._check_sizes()
        for key, boxes in self._boxes.items():
            shape = self._manifest.shapes[key]
            self._dtype(key)
            left = uncovered(Box((0,) * len(shape), shape), (box.span for box in boxes))
            if left:
                raise CheckpointError(
                    f"{self.path}: {key} lacks elements {list(left[0].offset)} + {list(left[0].shape)}. {REMEDY}"
                )
        if not deep:
            return
        for file in self._files.values():
            self._check_whole(file)
        self._unverified = {(box.file, box.key) for box in self._manifest.boxes}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(self._load, self._manifest.boxes))

    def close(self) -> None:
        """Close the files."""
        self._source = open_files(self.path)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, name: str, role: str) -> str:
        key = tensor_key(role, name)
        if key not in self._boxes:
            has = ", ".join(self.roles(name)) or "nothing"
            raise CheckpointError(
                f"{self.path}: holds no {role} of {name} (it holds {has}). {REMEDY}"
            )
        return key

    def _dtype(self, key: str) -> str:
        found = sorted({box.dtype for box in self._boxes[key]})
        if len(found) != 1:
            raise CheckpointError(
                f"{self.path}: the boxes of {key} have the dtypes {', '.join(found) or 'none'}; they must share one. {REMEDY}"
            )
        return found[0]

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
    parsed = parse_path(path)
    return Reader(parsed if isinstance(parsed, S3Path) else parsed.resolve(), verify=verify)


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest complete checkpoint, open and verified, and the newer ones that were rejected, each with the reason."""

    path: AnyPath | None = None
    reader: Reader | None = None
    rejected: list[tuple[AnyPath, str]] = field(default_factory=list)


def newest_good(checkpoints: AnyPath, run: str = "") -> FoundCheckpoint:
    """The newest checkpoint that verifies: every byte on disk, every size in S3 (boxes are checked when they are read).

    A checkpoint of another run than `run` is rejected.
    """
    rejected: list[tuple[AnyPath, str]] = []
    is_remote = isinstance(checkpoints, S3Path)
    for path in reversed(
        remote_folders(checkpoints)
        if isinstance(checkpoints, S3Path)
        else step_folders(checkpoints)
    ):
        try:
            reader = open_checkpoint(path)
            if run and reader.run not in ("", run):
                raise CheckpointError(f"{path}: was saved by another run.")
            reader.verify(deep=not is_remote)
        except StoreDown:
            raise  # it may be good: falling back to an older one would lose steps
        except CheckpointError as problem:
            rejected.append((path, str(problem)))
        else:
            return FoundCheckpoint(path, reader, rejected)
    return FoundCheckpoint(rejected=rejected)


def remote_folders(checkpoints: S3Path) -> list[S3Path]:
    """The checkpoints and snapshots below an S3 path that have a manifest, oldest first."""
    names = {
        name.split("/")[0]
        for name in S3(checkpoints.endpoint).sizes(checkpoints)
        if name.count("/") == 1 and name.endswith("/" + MANIFEST)
    }
    found = {
        int(match.group(2)): name
        for name in sorted(names)
        if (match := STEP_FOLDER.fullmatch(name))
    }
    return [checkpoints / found[step] for step in sorted(found)]


def step_folders(checkpoints: Path, *, snapshots: bool = True) -> list[Path]:
    """The checkpoints of a run, and its snapshots, oldest first; one whose replacement never came counts too."""
    if not checkpoints.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in sorted(
        checkpoints.iterdir()
    ):  # `.replaced-step-N` and `snapshot-N` sort before `step-N`, which wins
        match = STEP_FOLDER.fullmatch(path.name.removeprefix(REPLACED_PREFIX))
        if match and path.is_dir() and (snapshots or match.group(1) == "step"):
            found[int(match.group(2))] = path
    return [found[step] for step in sorted(found)]


def step_of(path: AnyPath) -> int:
    """The step in the name of a checkpoint's folder."""
    match = STEP_FOLDER.fullmatch(path.name.removeprefix(REPLACED_PREFIX))
    assert match is not None
    return int(match.group(2))


def locate(path: AnyPath | str) -> AnyPath:
    """The checkpoint that a path means: a checkpoint itself, or the newest good one of a run or checkpoints folder."""
    location = parse_path(path)
    if open_files(location).read(MANIFEST) is not None:
        return location
    folder = location
    if isinstance(location, S3Path):
        if STEP_FOLDER.fullmatch(
            link := (open_files(location.parent).read(location.name) or b"")[:64].decode(
                errors="replace"
            )
        ):
            return location.parent / link
    elif (location / "checkpoints").is_dir():
        folder = location / "checkpoints"
    found = newest_good(folder)
    for _, reason in found.rejected:
        logging.getLogger("headway").warning("%s", reason)
    if found.path is None:
        given = "Give a run folder or a folder such as runs/NAME/checkpoints/latest."
        if not found.rejected:
            raise ConfigError(f"{path}: there is no checkpoint and no model. {given}")
        raise CheckpointError(f"{path}: holds no good checkpoint. {given}")
    return found.path

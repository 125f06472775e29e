"""Access to the bytes of a checkpoint: memory-mapped files, or S3 objects of which only the needed
ranges are fetched.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.checkpoint.manifest import SAFETENSORS_DTYPES
from headway.config.regular_file import regular_only
from headway.errors import CheckpointError
from headway.runtime.json_file import read_bounded
from headway.runtime.paths import AnyPath, S3Path
from headway.runtime.storage import sha256_file
from headway.runtime.temporary import make_temporary_folder

if TYPE_CHECKING:
    import torch

    from headway.runtime.s3 import S3

REMEDY = "Use another checkpoint."
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header, a little-endian integer."""
TORCH_DTYPES = {code: name for name, code in SAFETENSORS_DTYPES.items()}


class CheckpointFiles(Protocol):
    """The files of one checkpoint."""

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file; a CheckpointError where it cannot be read."""
        ...

    def sha256(self, name: str) -> str:
        """The checksum of a whole file."""
        ...

    def header(self, name: str, limit: int) -> bytes:
        """The head of a safetensors file with the 8 bytes of its length, `limit` bytes at most."""
        ...

    def tensor(self, name: str, key: str, header: bytes) -> torch.Tensor:
        """One tensor of a safetensors file whose header was checked."""
        ...

    def folder(self, names: list[str], below: str) -> Path:
        """A local folder with these files of the folder `below`."""
        ...


def open_files(path: AnyPath) -> CheckpointFiles:
    """The files of a checkpoint, local or in S3."""
    if isinstance(path, S3Path):
        from headway.runtime.s3 import S3

        return S3Files(path, S3(path.endpoint))
    return LocalFiles(path)


class LocalFiles:
    """The files of a checkpoint in a local folder; tensors are views of memory-mapped files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, Any] = {}

    def read(self, name: str) -> bytes | None:
        """A whole file."""
        try:
            return read_bounded(self.path / name)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise self._unreadable(name, problem.strerror) from None

    def size(self, name: str) -> int:
        """Bytes of a file."""
        try:
            return (self.path / name).stat().st_size
        except OSError as problem:
            raise self._unreadable(name, problem.strerror) from None

    def sha256(self, name: str) -> str:
        """The checksum of a file."""
        try:
            return sha256_file(self.path / name)
        except OSError as problem:
            raise self._unreadable(name, problem.strerror) from None

    def header(self, name: str, limit: int) -> bytes:
        """The head of a file."""
        try:
            with open(self.path / name, "rb", opener=regular_only) as file:
                length = file.read(LENGTH_BYTES)
                # A damaged length must not make this read a whole file of many GB.
                return length + file.read(min(int.from_bytes(length, "little"), limit))
        except OSError as problem:
            raise self._unreadable(name, problem.strerror) from None

    def tensor(self, name: str, key: str, header: bytes) -> torch.Tensor:
        """A view of the mapped file."""
        from safetensors import SafetensorError, safe_open

        try:
            if name not in self._open:
                self._open[name] = safe_open(self.path / name, framework="pt")
            return self._open[name].get_tensor(key)
        except (OSError, SafetensorError) as problem:
            raise self._unreadable(name, problem) from None

    def folder(self, names: list[str], below: str) -> Path:
        """The folder itself."""
        return self.path / below

    def _unreadable(self, name: str, why: object) -> CheckpointError:
        return CheckpointError(f"{self.path / name}: cannot be read: {why}. {REMEDY}")


class S3Files:
    """Objects below a prefix.

    One tensor is in memory at a time; the last one is cached for its next box.
    """

    def __init__(self, location: S3Path, store: S3) -> None:
        self.location = location
        self.store = store
        self._sizes: dict[str, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}
        """Parsed headers by file."""
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None
        """The tensor read last, with its file and key."""
        self._downloaded: dict[str, Path] = {}
        """Temporary folders by the subfolder whose files they hold."""

    def read(self, name: str) -> bytes | None:
        """A whole object."""
        return self.store.read(self.location / name)

    def size(self, name: str) -> int:
        """Bytes of an object, from one listing of all."""
        if self._sizes is None:
            self._sizes = self.store.sizes(self.location)
        if name not in self._sizes:
            raise CheckpointError(
                f"{self.location / name}: cannot be read: there is no such object. {REMEDY}"
            )
        return self._sizes[name]

    def sha256(self, name: str) -> str:
        """The checksum of a small object."""
        return hashlib.sha256(self.read(name) or b"").hexdigest()

    def header(self, name: str, limit: int) -> bytes:
        """The header of an object."""
        location = self.location / name
        length = self.store.read_range(location, 0, min(LENGTH_BYTES, self.size(name)))
        # A range past the end of an object is an error of the store, so the limit counts here too.
        header_bytes = min(int.from_bytes(length, "little"), limit - LENGTH_BYTES)
        return length + self.store.read_range(location, LENGTH_BYTES, header_bytes)

    def tensor(self, name: str, key: str, header: bytes) -> torch.Tensor:
        """One range of an object."""
        import torch

        # On another layout, several reads in a row take their parts of the same stored box.
        if self._last is not None and self._last[0] == (name, key):
            return self._last[1]

        if name not in self._entries:
            self._entries[name] = json.loads(header[LENGTH_BYTES:])
        entry = self._entries[name].get(key)
        if entry is None:
            raise CheckpointError(f"{self.location / name}: holds no {key}. {REMEDY}")

        # Offsets count from the end of the header.
        start, end = entry["data_offsets"]
        content = self.store.read_range(self.location / name, len(header) + start, end - start)

        # A bytearray, as tensors must be writable; torch refuses an empty buffer.
        if content:
            flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(getattr(torch, TORCH_DTYPES[entry["dtype"]])).view(entry["shape"])
        self._last = ((name, key), tensor)
        return tensor

    def folder(self, names: list[str], below: str) -> Path:
        """A temporary folder with copies, deleted with this object."""
        if below not in self._downloaded:
            local = make_temporary_folder("download")
            weakref.finalize(self, shutil.rmtree, local, ignore_errors=True)
            self._downloaded[below] = local
            for name in names:
                target = local / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self.read(name) or b"")
        return self._downloaded[below] / below

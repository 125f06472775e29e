"""zip and tar archives: their members, in the archive's order, read as the files they are. tar is read as a stream."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, Self

from headway.errors import DataError
from headway.text.raw import RawFile


def members(raw: RawFile, kind: str) -> Iterator[RawFile]:
    """The files of a `zip` or `tar`; each must be read before the next is asked for. Hidden ones are passed over."""
    for member in _zip(raw) if kind == "zip" else _tar(raw):
        inner = PurePosixPath(member.name.removeprefix(f"{raw.name}:"))
        if not any(part.startswith((".", "__MACOSX")) and part != "." for part in inner.parts):
            yield member


def _zip(raw: RawFile) -> Iterator[RawFile]:
    with raw.seekable() as stream:
        with _damage():
            archive = zipfile.ZipFile(stream)
        for entry in archive.infolist():
            if entry.flag_bits & 1:
                raise DataError(f"{raw.name}:{entry.filename}: the member is encrypted; unpack the archive first.")
            if entry.filename and not entry.is_dir():
                yield RawFile(f"{raw.name}:{entry.filename}", lambda entry=entry: _open(archive, entry))


def _open(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> io.BufferedReader:
    with _damage():
        member: Any = archive.open(entry)
    return io.BufferedReader(member)


@contextmanager
def _damage() -> Iterator[None]:
    """The many ways the library fails on damaged headers, as the one that readers of files know."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        raise zipfile.BadZipFile(str(error)) from None


def _tar(raw: RawFile) -> Iterator[RawFile]:
    with raw.open() as stream:
        archive = tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictEntry)  # noqa: SIM115 - the stream's owner closes it
        for entry in archive:
            if entry.isfile():
                yield RawFile(f"{raw.name}:{entry.name}", lambda entry=entry: _extract(archive, entry))


class _StrictEntry(tarfile.TarInfo):
    """An entry whose damaged or missing header is an error; the library would take it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(str(error)) from None


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> io.BufferedReader:
    found = archive.extractfile(entry)
    assert isinstance(found, io.BufferedReader)
    return found

"""Files and archive members as streams of bytes, decompressed by content (gz, bz2, zst, xz). Errors name the damaged file.

Members of zip and tar archives come in the archive's order; tar is read as a stream.
Invariant: nothing here reads more of a file than its caller asks for.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shutil
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tarfile import EOFHeaderError, HeaderError, ReadError  # pyright: ignore[reportAttributeAccessIssue]
from typing import IO, TYPE_CHECKING, Any, Self

from headway.errors import DataError
from headway.runtime.optional import need
from headway.text.section import FileSection

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMPRESSION_SUFFIXES = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".xz": "xz",
}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\x00": "xz"}
CHUNK_BYTES = 1 << 18
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class RawFile:
    """A file or a member of an archive: its `name` for messages, and `open_stored` for its bytes as stored."""

    name: str
    open_stored: Callable[[], io.BufferedReader]
    path: Path | None = None
    section: FileSection | None = None
    """Only these lines of a file that is not compressed."""
    row_groups: tuple[int, int] | None = None
    """Only these row groups of a Parquet file: the first, and the one after the last."""

    @staticmethod
    def at(path: Path, name: str | None = None) -> RawFile:
        """A file on disk; `name`: what it is called in messages and documents."""
        return RawFile(str(path) if name is None else name, lambda: open(path, "rb"), path)

    @property
    def suffix(self) -> str:
        """The suffix of the format in lower case, without the compression suffix: `.jsonl` of `a.JSONL.gz`."""
        name = Path(self.name.lower())
        if name.suffix in (".tgz", ".tbz2", ".txz"):
            return ".tar"
        return name.with_suffix("").suffix if name.suffix in COMPRESSION_SUFFIXES else name.suffix

    @contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """The decompressed bytes; damage and read errors are DataErrors that name the file."""
        if self.section is not None:
            with reading(self.name), self.section.open() as stream:
                yield stream
            return
        with (
            reading(self.name),
            self.open_stored() as stored,
            decompressed(stored, self.name) as stream,
        ):
            yield stream

    @contextmanager
    def seekable(self) -> Iterator[IO[bytes]]:
        """The decompressed bytes as a seekable file, copied to a temporary one if needed."""
        with self.open() as stream:
            if (
                self.path is not None
                and isinstance(stream, io.BufferedReader)
                and stream.seekable()
            ):
                yield stream
                return
            with tempfile.TemporaryFile(prefix="headway-raw-") as copy:
                shutil.copyfileobj(stream, copy, CHUNK_BYTES)
                copy.seek(0)
                yield copy


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of reading and decompressing into a DataError that names the file."""
    try:
        yield
    except _damage() as error:
        raise DataError(
            f"{name}: the compressed data is damaged or cut short ({error}); fetch or write the file again."
        ) from None
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{name}: the archive is damaged or cut short ({error}); fetch or write it again."
        ) from None
    except OSError as error:
        if error.errno is None:
            raise DataError(
                f"{name}: the compressed data is damaged or cut short ({error}); fetch or write the file again."
            ) from None
        raise DataError(f"{name}: cannot be read: {error.strerror}.") from None


def _damage() -> tuple[type[Exception], ...]:
    """What decompressors raise. The one of zstd exists only where a zstd file was opened."""
    zstandard = sys.modules.get("zstandard")
    plain = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    return plain if zstandard is None else (*plain, zstandard.ZstdError)


@contextmanager
def decompressed(stored: io.BufferedReader, name: str) -> Iterator[io.BufferedIOBase]:
    """Decompress by content; a name with the suffix of another compression is an error."""
    head = stored.peek(6)
    found = compression_of(head)
    promised = COMPRESSION_SUFFIXES.get(Path(name.lower()).suffix)
    if promised is not None and not head:
        raise DataError(f"{name}: the file is empty; {promised} data is expected.")
    if promised is not None and found != promised:
        raise DataError(
            f"{name}: the name promises {promised} data, but the content is {found or 'not compressed'}."
        )
    if found is None:
        yield stored
        return
    if found == "zstd":
        need("zstandard", name)
    stream = {"gzip": _gzip, "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile, "zstd": _zstd}[found](
        stored
    )
    try:
        yield stream
    finally:
        stream.close()


def compression_of(head: bytes) -> str | None:
    """The compression of data that begins with these bytes."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)


def _gzip(stored: io.BufferedReader) -> io.BufferedIOBase:
    return gzip.GzipFile(fileobj=stored)


def _zstd(stored: io.BufferedReader) -> io.BufferedIOBase:
    return io.BufferedReader(_ZstdFrames(stored), CHUNK_BYTES)


class _ZstdFrames(io.RawIOBase):
    """Concatenated zstd frames; unlike the library's reader, an error if the file ends inside a frame."""

    def __init__(self, stored: io.BufferedReader) -> None:
        super().__init__()
        import zstandard

        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        room = memoryview(buffer)
        while not self._ready:
            chunk = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = self._decompressor.decompressobj(), False
            chunk = chunk or self._stored.read(CHUNK_BYTES)
            if not chunk:
                if self._begun:
                    raise EOFError("the last frame has no end")
                return 0
            self._begun = True
            self._ready = memoryview(self._frame.decompress(chunk))
        size = min(len(room), len(self._ready))
        room[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def lines(raw: RawFile) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1, without line ends; invalid UTF-8 is an error with file and line."""
    with raw.open() as stream:
        for number, line in enumerate(stream, 1 if raw.section is None else raw.section.first_line):
            yield number, decode(line, raw.name, number).rstrip("\r\n")


def text_blocks(raw: RawFile) -> Iterator[str]:
    """The text of a file in blocks that are not empty, in bounded memory."""
    with raw.open() as stream:
        line, column, rest = 1, 0, b""
        while data := stream.read(BLOCK_BYTES):
            data = rest + data
            end = whole_characters(data)
            data, rest = data[:end], data[end:]
            if text := decode(data, raw.name, line, column):
                yield text
            newline = data.rfind(b"\n")
            column = column + len(data) if newline < 0 else len(data) - newline - 1
            line += data.count(b"\n")
        if rest:
            decode(rest, raw.name, line, column)


def whole_characters(data: bytes) -> int:
    """How many of these bytes are whole UTF-8 characters: at most the last three belong to a character that is cut."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            return (
                len(data) - back
                if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
                else len(data)
            )
        if byte < 0x80:
            break
    return len(data)


def decode(data: bytes, name: str, line: int, column: int = 0) -> str:
    """Text of UTF-8 bytes that begin at `column` of `line`; invalid bytes are an error. A byte order mark at the start is dropped."""
    if line == 1 and not column and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{name}: the text is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)."
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = line + data.count(b"\n", 0, error.start)
        newline = data.rfind(b"\n", 0, error.start)
        place = error.start - newline if newline >= 0 else column + error.start + 1
        raise DataError(
            f"{name}:{at}: not UTF-8 at byte {place} of the line (0x{data[error.start]:02x}, {error.reason}); convert the file to UTF-8."
        ) from None
    return text.removeprefix("\ufeff") if line == 1 and not column else text


def archive_members(raw: RawFile, kind: str) -> Iterator[RawFile]:
    """The files in a `zip` or `tar`; read each one before taking the next. Hidden files are skipped."""
    for member in _zip(raw) if kind == "zip" else _tar(raw):
        inner = PurePosixPath(member.name.removeprefix(f"{raw.name}:"))
        if not any(part.startswith((".", "__MACOSX")) and part != "." for part in inner.parts):
            yield member


def _zip(raw: RawFile) -> Iterator[RawFile]:
    with raw.seekable() as stream:
        with _damaged_zip():
            archive = zipfile.ZipFile(stream)
        for entry in archive.infolist():
            if entry.flag_bits & 1:
                raise DataError(
                    f"{raw.name}:{entry.filename}: the member is encrypted; unpack the archive first."
                )
            if entry.filename and not entry.is_dir():
                yield RawFile(
                    f"{raw.name}:{entry.filename}",
                    lambda entry=entry: _open_zip_member(archive, entry),
                )


def _open_zip_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> io.BufferedReader:
    with _damaged_zip():
        member: Any = archive.open(entry)
    return io.BufferedReader(member)


@contextmanager
def _damaged_zip() -> Iterator[None]:
    """Turn the many errors that zipfile raises for damaged headers into BadZipFile."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        raise zipfile.BadZipFile(str(error)) from None


@contextmanager
def open_tar(raw: RawFile) -> Iterator[tarfile.TarFile]:
    """A tar as a stream of entries; a damaged header is an error."""
    with raw.open() as stream:
        yield tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictEntry)  # noqa: SIM115 - the stream's owner closes it


def _tar(raw: RawFile) -> Iterator[RawFile]:
    with open_tar(raw) as archive:
        for entry in archive:
            if entry.isfile():
                yield RawFile(
                    f"{raw.name}:{entry.name}", lambda entry=entry: _extract(archive, entry)
                )


class _StrictEntry(tarfile.TarInfo):
    """A tar entry whose damaged header is an error; the library would take it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:  # the block of zeros with which an archive ends
            raise
        except HeaderError as error:
            raise ReadError(str(error)) from None


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> io.BufferedReader:
    found = archive.extractfile(entry)
    assert isinstance(found, io.BufferedReader)
    return found

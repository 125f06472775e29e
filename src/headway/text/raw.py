"""Files and archive members as streams of bytes, decompressed by content (gz, bz2, zst, xz).
Errors name the damaged file.

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
from tarfile import (
    EOFHeaderError,  # pyright: ignore[reportAttributeAccessIssue]
    HeaderError,
    ReadError,
)
from typing import IO, TYPE_CHECKING, Any, Self

from headway.config.regular_file import regular_only
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
MAGIC_BYTES = max(map(len, _MAGIC))
CHUNK_BYTES = 1 << 18
"""What is read of a compressed file at once."""
BLOCK_BYTES = 1 << 20
"""About the size of a block of text."""
ENCRYPTED_FLAG = 1
"""Bit of a zip entry's flags."""
ZSTD_MAX_WINDOW = 1 << 31
"""The largest window that zstd can write (--ultra --long=31)."""


@dataclass(frozen=True)
class RawFile:
    """A file or a member of an archive: its `name` for messages, and `open_stored` for its bytes
    as stored.
    """

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

        def stored() -> io.BufferedReader:
            return open(path, "rb", opener=regular_only)

        return RawFile(str(path) if name is None else name, stored, path)

    @property
    def suffix(self) -> str:
        """The suffix of the format in lower case, without the compression suffix: `.jsonl` of
        `a.JSONL.gz`.
        """
        name = Path(self.name.lower())
        if name.suffix in (".tgz", ".tbz2", ".txz"):
            return ".tar"
        if name.suffix in COMPRESSION_SUFFIXES:
            return name.with_suffix("").suffix
        return name.suffix

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

            # Parquet and zip have their table of contents at the end.
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
            f"{name}: the compressed data is damaged or cut short ({error}); fetch or write the "
            "file again."
        ) from None
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{name}: the archive is damaged or cut short ({error}); fetch or write it again."
        ) from None
    except OSError as error:
        # bz2 reports damage as an OSError without a number; those of the system have one.
        if error.errno is None:
            raise DataError(
                f"{name}: the compressed data is damaged or cut short ({error}); fetch or write "
                "the file again."
            ) from None

        raise DataError(f"{name}: cannot be read: {error.strerror}.") from None


def _damage() -> tuple[type[Exception], ...]:
    """What decompressors raise. The one of zstd exists only where a zstd file was opened."""
    zstandard = sys.modules.get("zstandard")
    plain = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    if zstandard is None:
        return plain
    return (*plain, zstandard.ZstdError)


@contextmanager
def decompressed(stored: io.BufferedReader, name: str) -> Iterator[io.BufferedIOBase]:
    """Decompress by content; a name with the suffix of another compression is an error."""
    head = stored.peek(MAGIC_BYTES)
    compression = compression_of(head)
    promised = COMPRESSION_SUFFIXES.get(Path(name.lower()).suffix)
    if promised is not None and not head:
        raise DataError(f"{name}: the file is empty; {promised} data is expected.")

    if promised is not None and compression != promised:
        raise DataError(
            f"{name}: the name promises {promised} data, but the content is "
            f"{compression or 'not compressed'}."
        )

    if compression is None:
        yield stored
        return
    if compression == "zstd":
        need("zstandard", name)

    opener = {"gzip": _gzip, "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile, "zstd": _zstd}[compression]
    stream = opener(stored)
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
    """Concatenated zstd frames; unlike the library's reader, an error if the file ends inside a
    frame.
    """

    def __init__(self, stored: io.BufferedReader) -> None:
        super().__init__()
        import zstandard

        self._stored = stored
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW)
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        """Whether the current frame has got any bytes."""
        self._ready = memoryview(b"")
        """Decompressed bytes that nobody has read yet."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        room = memoryview(buffer)
        while not self._ready:
            # A frame has ended: what follows it begins the next one.
            chunk = b""
            if self._frame.eof:
                chunk = self._frame.unused_data
                self._frame = self._decompressor.decompressobj()
                self._begun = False

            chunk = chunk or self._stored.read(CHUNK_BYTES)
            if not chunk:
                if self._begun:
                    raise EOFError("the last frame has no end")
                return 0

            self._begun = True
            self._ready = memoryview(self._frame.decompress(chunk))

        size = min(len(room), len(self._ready))
        room[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def lines(raw: RawFile) -> Iterator[tuple[int, str]]:
    """The lines of a file, numbered from 1, without line ends; invalid UTF-8 is an error with
    file and line.
    """
    first_line = 1
    if raw.section is not None:
        first_line = raw.section.first_line

    with raw.open() as stream:
        for number, line in enumerate(stream, first_line):
            yield number, decode(line, raw.name, number).rstrip("\r\n")


def text_blocks(raw: RawFile) -> Iterator[str]:
    """The text of a file in blocks that are not empty, in bounded memory."""
    with raw.open() as stream:
        line = 1
        column = 0
        # Bytes of a character that the end of a block cuts; they begin the next block.
        cut_bytes = b""
        while block := stream.read(BLOCK_BYTES):
            data = cut_bytes + block
            end = whole_characters(data)
            cut_bytes = data[end:]
            data = data[:end]
            if text := decode(data, raw.name, line, column):
                yield text

            # Line and column of what comes next, for errors.
            newline = data.rfind(b"\n")
            if newline < 0:
                column += len(data)
            else:
                column = len(data) - newline - 1
            line += data.count(b"\n")

        # The file ends inside a character: decoding it raises the error.
        if cut_bytes:
            decode(cut_bytes, raw.name, line, column)


def whole_characters(data: bytes) -> int:
    """How many of these bytes are whole UTF-8 characters: at most the last three belong to a
    character that is cut.
    """
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        # ASCII: nothing is cut.
        if byte < 0x80:
            break

        # A first byte says how many bytes its character has. Other bytes are 0x80 to 0xBF.
        if byte >= 0xC0:
            length = 4
            if byte < 0xE0:
                length = 2
            elif byte < 0xF0:
                length = 3

            if back < length:
                return len(data) - back
            return len(data)

    return len(data)


def decode(data: bytes, name: str, line: int, column: int = 0) -> str:
    """Text of UTF-8 bytes that begin at `column` of `line`; invalid bytes are an error.

    A byte order mark at the start is dropped.
    """
    # The byte order marks of UTF-16.
    if line == 1 and not column and data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{name}: the text is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)."
        )

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        error_line = line + data.count(b"\n", 0, error.start)
        newline = data.rfind(b"\n", 0, error.start)
        if newline >= 0:
            error_byte = error.start - newline
        else:
            error_byte = column + error.start + 1

        raise DataError(
            f"{name}:{error_line}: not UTF-8 at byte {error_byte} of the line "
            f"(0x{data[error.start]:02x}, {error.reason}); convert the file to UTF-8."
        ) from None

    if line == 1 and not column:
        return text.removeprefix("\ufeff")

    return text


def archive_members(raw: RawFile, kind: str) -> Iterator[RawFile]:
    """The files in a `zip` or `tar`; read each one before taking the next.

    Hidden files are skipped.
    """
    members = _zip(raw) if kind == "zip" else _tar(raw)
    for member in members:
        inner = PurePosixPath(member.name.removeprefix(f"{raw.name}:"))
        # macOS adds a folder __MACOSX with copies of all names to its archives.
        if not any(part.startswith((".", "__MACOSX")) and part != "." for part in inner.parts):
            yield member


def _zip(raw: RawFile) -> Iterator[RawFile]:
    """The members of a zip in its order; an encrypted one is an error."""
    with raw.seekable() as stream:
        with _damaged_zip():
            archive = zipfile.ZipFile(stream)

        for entry in archive.infolist():
            if entry.flag_bits & ENCRYPTED_FLAG:
                raise DataError(
                    f"{raw.name}:{entry.filename}: the member is encrypted; unpack the archive "
                    "first."
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
        # Not closed here: the stream belongs to `raw`.
        yield tarfile.open(  # noqa: SIM115
            fileobj=stream, mode="r|", tarinfo=_StrictEntry
        )


def _tar(raw: RawFile) -> Iterator[RawFile]:
    with open_tar(raw) as archive:
        for entry in archive:
            if entry.isfile():
                yield RawFile(
                    f"{raw.name}:{entry.name}", lambda entry=entry: _extract(archive, entry)
                )


class _StrictEntry(tarfile.TarInfo):
    """A tar entry whose damaged header is an error; the library would take it for the end of the
    archive.
    """

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:
            # The block of zeros with which an archive ends.
            raise
        except HeaderError as error:
            raise ReadError(str(error)) from None


def _extract(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> io.BufferedReader:
    stream = archive.extractfile(entry)
    assert isinstance(stream, io.BufferedReader)
    return stream

"""A PNG file of plain RGB pixels with the standard library, so that generated pictures need no
package. Pixels: uint8 [height, width, 3].

Written files hold stored (not compressed) blocks: their bytes depend on the pixels alone, not on
the version of zlib.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
STORED_BYTES = 65535
"""The longest stored block of deflate (RFC 1951)."""
ZLIB_HEADER = b"\x78\x01"
PLAIN_RGB = b"\x08\x02\x00\x00\x00"
"""In IHDR: 8 bits, RGB, and no other choice than 0 for the rest."""
IDAT_START = 41
"""Where the data of the first IDAT chunk begins, right after IHDR."""
SHORTEST_FILE = 57
"""Bytes of the signature (8), of IHDR (25), and of IDAT and IEND without data (12 each)."""


def write_png(pixels: NDArray[np.uint8], *, compressed: bool = False) -> bytes:
    """The bytes of a PNG file; compressed ones are smaller and depend on the version of zlib."""
    height, width, _ = pixels.shape
    # The first byte of a row is its filter: none.
    rows = np.zeros((height, 1 + 3 * width), np.uint8)
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    raw = rows.tobytes()
    header = struct.pack(">II", width, height) + PLAIN_RGB
    if compressed:
        body = zlib.compress(raw)
    else:
        body = _stored(raw)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _stored(raw: bytes) -> bytes:
    """A zlib stream of stored blocks: is it the last, length, its complement, the bytes."""
    body = bytearray(ZLIB_HEADER)
    for begin in range(0, len(raw), STORED_BYTES):
        part = raw[begin : begin + STORED_BYTES]
        is_last = begin + len(part) == len(raw)
        body += struct.pack("<BHH", is_last, len(part), len(part) ^ 0xFFFF) + part
    return bytes(body) + struct.pack(">I", zlib.adler32(raw))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def read_plain_png(data: bytes, name: str) -> NDArray[np.uint8] | None:
    """The pixels of a file that `write_png` made; None for any other PNG, which Pillow reads."""
    if (
        not data.startswith(SIGNATURE)
        or len(data) < SHORTEST_FILE
        or data[24:29] != PLAIN_RGB
        or data[37:41] != b"IDAT"
    ):
        return None
    width, height = struct.unpack(">II", data[16:24])
    size = height * (1 + 3 * width)

    # One chunk of exactly the stored blocks of these pixels: a header, 5 bytes for each block, the
    # pixels, a checksum.
    num_blocks = -(-size // STORED_BYTES)
    stored_bytes = int.from_bytes(data[33:37], "big")
    if stored_bytes != 2 + size + 5 * num_blocks + 4 or data[41:43] != ZLIB_HEADER:
        return None
    end = IDAT_START + stored_bytes
    if len(data) < end + 16 or data[end + 8 : end + 12] != b"IEND":
        raise DataError(f"{name}: the picture is cut short.")
    if zlib.crc32(data[37:end]) != int.from_bytes(data[end : end + 4], "big"):
        raise DataError(f"{name}: the picture is damaged (its checksum differs).")
    try:
        # One byte more than there may be: a bomb is not unpacked.
        raw = zlib.decompressobj().decompress(data[IDAT_START:end], size + 1)
    except zlib.error as error:
        raise DataError(f"{name}: the picture is damaged ({error}).") from None
    rows = np.frombuffer(raw, np.uint8)
    # A filter other than none is somebody else's file.
    if len(rows) != size or rows[:: 1 + 3 * width].any():
        return None
    return rows.reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)

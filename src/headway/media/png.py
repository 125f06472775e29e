"""A PNG file of plain RGB pixels with the standard library, so that generated pictures need no package. Pixels: uint8 [height, width, 3].

Written files hold stored (not compressed) blocks: their bytes depend on the pixels alone, not on the version of zlib.
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


def write_png(pixels: NDArray[np.uint8], *, compressed: bool = False) -> bytes:
    """The bytes of a PNG file; compressed ones are smaller and depend on the version of zlib."""
    height, width, _ = pixels.shape
    rows = np.zeros(
        (height, 1 + 3 * width), np.uint8
    )  # the first byte of a row is its filter: none
    rows[:, 1:] = pixels.reshape(height, 3 * width)
    raw = rows.tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(raw) if compressed else _stored(raw)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _stored(raw: bytes) -> bytes:
    body = bytearray(b"\x78\x01")
    for at in range(0, len(raw), STORED_BYTES):
        part = raw[at : at + STORED_BYTES]
        body += (
            struct.pack("<BHH", at + len(part) == len(raw), len(part), len(part) ^ 0xFFFF) + part
        )
    return bytes(body) + struct.pack(">I", zlib.adler32(raw))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def read_plain_png(data: bytes, name: str) -> NDArray[np.uint8] | None:
    """The pixels of a file that `write_png` made; None for any other PNG, which Pillow reads."""
    if (
        not data.startswith(SIGNATURE)
        or len(data) < 57
        or data[24:29] != b"\x08\x02\x00\x00\x00"
        or data[37:41] != b"IDAT"
    ):
        return None
    width, height = struct.unpack(">II", data[16:24])
    size = height * (1 + 3 * width)
    if (
        int.from_bytes(data[33:37], "big") != 2 + size + 5 * -(-size // STORED_BYTES) + 4
        or data[41:43] != b"\x78\x01"
    ):
        return None
    end = 41 + int.from_bytes(data[33:37], "big")
    if len(data) < end + 16 or data[end + 8 : end + 12] != b"IEND":
        raise DataError(f"{name}: the picture is cut short.")
    if zlib.crc32(data[37:end]) != int.from_bytes(data[end : end + 4], "big"):
        raise DataError(f"{name}: the picture is damaged (its checksum differs).")
    try:
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(data[41:end], size + 1)
    except zlib.error as error:
        raise DataError(f"{name}: the picture is damaged ({error}).") from None
    rows = np.frombuffer(raw, np.uint8)
    if len(rows) != size or rows[:: 1 + 3 * width].any():
        return None
    return rows.reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)

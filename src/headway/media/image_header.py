"""The kind and size of a picture from its first bytes, before any decoder sees it. In: bytes; out:
(kind, width, height).

PNG     8-byte signature, then IHDR
JPEG    FF D8, then segments; the first frame segment (FF C0 to FF CF, without C4, C8, CC) holds the
        size
WebP    RIFF ... WEBP, then VP8 (lossy), VP8L (lossless) or VP8X (extended)
"""

from __future__ import annotations

from typing import Literal

from headway.errors import DataError

IMAGE_KINDS = ("PNG", "JPEG", "WEBP")
NOT_FRAMES = (0xC4, 0xC8, 0xCC)
"""Markers of JPEG between those of frames: Huffman tables, reserved, arithmetic coding."""
ALONE = (0x01, *range(0xD0, 0xD9))
"""Markers of JPEG without a length."""
ORIENTATION = 274
"""The entry of EXIF that says how a picture is turned."""
PNG_HEADER_BYTES = 33
"""Signature and IHDR with its checksum."""


def image_size(data: bytes, name: str) -> tuple[str, int, int]:
    """The kind, width and height that a header claims; any other file is an error."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        if len(data) < PNG_HEADER_BYTES or data[12:16] != b"IHDR":
            raise DataError(f"{name}: the PNG header is damaged or cut short.")
        return "PNG", int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    if data.startswith(b"\xff\xd8"):
        return "JPEG", *_jpeg_size(data, name)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP", *_webp_size(data, name)
    if not data:
        raise DataError(f"{name}: the file is empty.")
    raise DataError(
        f"{name}: not a PNG, JPEG or WebP picture (it begins with {data[:8].hex(' ')})."
    )


def orientation(data: bytes) -> int:
    """How a picture is turned to stand upright, 1 to 8 as EXIF counts; 1 where EXIF says nothing.

    Reads EXIF alone, and of it the one entry; whatever is damaged counts as not there.
    """
    try:
        block = _exif(data)
        if block is None:
            return 1
        order: Literal["little", "big"] = "little" if block[:2] == b"II" else "big"
        first = int.from_bytes(block[4:8], order)
        count = int.from_bytes(block[first : first + 2], order)
        # An entry: 2 bytes of tag, 2 of type, 4 of count, and the value.
        for entry in range(first + 2, first + 2 + 12 * count, 12):
            if int.from_bytes(block[entry : entry + 2], order) == ORIENTATION:
                value = int.from_bytes(block[entry + 8 : entry + 10], order)
                return value if 1 <= value <= 8 else 1
    except IndexError:
        pass
    return 1


def _exif(data: bytes) -> bytes | None:
    """The TIFF block of EXIF in a picture; None where it has none."""
    if data.startswith(b"\xff\xd8"):
        offset = 2
        # Up to the pixels, which begin at FF DA.
        while data[offset] == 0xFF and data[offset + 1] != 0xDA:
            length = int.from_bytes(data[offset + 2 : offset + 4], "big")
            segment = data[offset + 4 : offset + 2 + length]
            if data[offset + 1] == 0xE1 and segment.startswith(b"Exif\0\0"):
                return segment[6:]
            offset += 2 + max(2, length)
        return None
    if data.startswith(b"RIFF"):
        return _chunk(data, 12, b"EXIF", "little")
    return _chunk(data, 8, b"eXIf", "big")


def _chunk(
    data: bytes, offset: int, wanted: bytes, order: Literal["little", "big"]
) -> bytes | None:
    """The content of a chunk of a PNG (length, name, content, checksum) or a WebP (name, length,
    content, padding to an even length)."""
    while offset + 8 <= len(data):
        if order == "big":
            length = int.from_bytes(data[offset : offset + 4], order)
            name = data[offset + 4 : offset + 8]
            after = offset + 12 + length
        else:
            name = data[offset : offset + 4]
            length = int.from_bytes(data[offset + 4 : offset + 8], order)
            after = offset + 8 + length + length % 2
        if name == wanted:
            return data[offset + 8 : offset + 8 + length].removeprefix(b"Exif\0\0")
        offset = after
    return None


def _jpeg_size(data: bytes, name: str) -> tuple[int, int]:
    # Segments: FF, a marker, a length of 2 bytes that counts itself, the content.
    offset = 2
    while offset + 4 <= len(data):
        if data[offset] != 0xFF:
            break
        marker = data[offset + 1]
        if marker == 0xFF:  # padding
            offset += 1
            continue
        if marker in ALONE:
            offset += 2
            continue
        if 0xC0 <= marker <= 0xCF and marker not in NOT_FRAMES:
            if offset + 9 > len(data):
                break
            # After the length: one byte of precision, then the height and the width.
            height = int.from_bytes(data[offset + 5 : offset + 7], "big")
            width = int.from_bytes(data[offset + 7 : offset + 9], "big")
            return width, height
        # At least the length itself, so that a damaged length of 0 still moves on.
        offset += 2 + max(2, int.from_bytes(data[offset + 2 : offset + 4], "big"))
    raise DataError(f"{name}: the JPEG header is damaged or cut short.")


def _webp_size(data: bytes, name: str) -> tuple[int, int]:
    form = data[12:16]
    if form == b"VP8X" and len(data) >= 30:
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        return width, height
    if form == b"VP8L" and len(data) >= 25 and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form == b"VP8 " and len(data) >= 30 and data[23:26] == b"\x9d\x01\x2a":
        # The upper two bits of each are a scale for display.
        width = int.from_bytes(data[26:28], "little") & 0x3FFF
        height = int.from_bytes(data[28:30], "little") & 0x3FFF
        return width, height
    raise DataError(f"{name}: the WebP header is damaged or cut short.")

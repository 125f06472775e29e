"""How byte-level vocabularies spell bytes: each of the 256 bytes is one printable character, so that a token is a readable string.

Printable Latin-1 bytes stand for themselves; the other 68 are numbered from U+0100 on, in order. This is the spelling of GPT-2's
vocabulary, which every byte-level tokenizer.json shares.
"""

from collections.abc import Iterable

_SELF = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _SELF]

BYTE_TO_CHAR: tuple[str, ...] = tuple(chr(byte) if byte in _SELF else chr(0x100 + _OTHERS.index(byte)) for byte in range(256))
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def spell(data: bytes) -> str:
    """The vocabulary's spelling of some bytes."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, data))


def unspell(token: str) -> bytes | None:
    """The bytes a token spells, or None if it is no byte-level spelling."""
    found: Iterable[int | None] = map(CHAR_TO_BYTE.get, token)
    numbers = list(found)
    return bytes(n for n in numbers if n is not None) if None not in numbers else None

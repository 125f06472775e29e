"""Byte-level vocabularies: how they spell bytes, and where they split a text into words before
byte pairs are merged.

Spelling: each of the 256 bytes is one printable character, so that a token is a readable string.
Printable Latin-1 bytes stand for themselves; the other 68 are numbered from U+0100 on, in order.
Every byte-level tokenizer.json has this spelling from GPT-2.

Words: no token ever crosses a split. The pattern is written once, in the part of the syntax that
`tokenizers` (Oniguruma) and the `regex` module read the same way, so that words counted in
training are the words split in use. Its branches, in order: English clitics; runs of Han
characters; a word of other letters with at most one leading space or sign; up to three digits;
signs with the newlines after them; newlines; spaces before a word; other spaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

# headway's own pattern, for tokenizers that it trains. Runs of Han are words of their own, because
# Chinese has no spaces; otherwise whole phrases with the Latin letters around them would be merged.
WORDS = (
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
    r"|\p{Han}+"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

# The patterns of published vocabularies, character for character.
_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
CL100K = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST

# Printable Latin-1 without the space (0x20, 0xA0) and the soft hyphen (0xAD).
_SELF = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _SELF]

BYTE_TO_CHAR: tuple[str, ...] = tuple(
    chr(byte) if byte in _SELF else chr(0x100 + _OTHERS.index(byte)) for byte in range(256)
)
CHAR_TO_BYTE: dict[str, int] = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def spell(data: bytes) -> str:
    """The vocabulary's spelling of some bytes."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, data))


def unspell(token: str) -> bytes | None:
    """The bytes a token spells, or None if it is no byte-level spelling."""
    if CHAR_TO_BYTE.keys() >= set(token):
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    return None


def byte_level(pattern: str | None) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a byte-level vocabulary: split at `pattern` (None: at GPT-2's
    pattern), then spell each byte as a character.
    """
    from tokenizers import Regex, pre_tokenizers

    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), spelled])

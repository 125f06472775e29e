"""Where a text may be cut before byte pairs are merged: no token ever crosses one of these cuts.

The pattern is written once, in the part of the syntax that `tokenizers` (Oniguruma) and the `regex` module read alike, so that words
counted in training are the words cut in use. Its branches, in order: English clitics; runs of Han characters, apart from all else;
a word of other letters with at most one leading space or sign; up to three digits; signs with the newlines after them; newlines;
spaces before a word; other spaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

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

_CLITICS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
CL100K = _CLITICS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST


def byte_level(pattern: str | None) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of a byte-level vocabulary: cut at `pattern` (None: GPT-2's own cuts), then spell each byte as a character."""
    from tokenizers import Regex, pre_tokenizers

    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), spelled])

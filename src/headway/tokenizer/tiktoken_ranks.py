"""Tiktoken rank files (qwen.tiktoken, Llama 3's tokenizer.model): one `base64-bytes rank` per
line, converted to byte-level BPE.

A rank file says which byte strings are tokens and in which order they were learned, not how they
are made; the two halves of each token are found by merging its bytes with the tokens learned
before it. The pattern that splits words is not in the file: it is known for the published
vocabularies, which are recognised by their size.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any, NamedTuple

from headway.errors import DataError
from headway.tokenizer.byte_level import CL100K, QWEN, byte_level, spell
from headway.tokenizer.load import Tokenizer

_LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
)


class RankVocabulary(NamedTuple):
    """What a rank file does not say about a published vocabulary."""

    pattern: str | None
    """Splits a text into words; None: GPT-2's own pattern."""
    normalises: bool
    """Whether texts are NFC-normalised first."""
    special: tuple[str, ...]
    """Special tokens, from the next id on."""
    roles: dict[str, str]


# By the number of ranks: Qwen, Llama 3, cl100k_base, GPT-2.
KNOWN = {
    151643: RankVocabulary(
        QWEN,
        normalises=True,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        roles={"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    ),
    128000: RankVocabulary(
        CL100K,
        normalises=False,
        special=_LLAMA3,
        roles={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    100256: RankVocabulary(
        CL100K,
        normalises=False,
        special=("<|reserved_0|>", "<|endoftext|>"),
        roles={"eos_token": "<|endoftext|>"},
    ),
    50256: RankVocabulary(
        None,
        normalises=False,
        special=("<|endoftext|>",),
        roles={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
}
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n?")


def is_ranks(data: bytes) -> bool:
    """Whether a file's content is a rank file."""
    return _LINE.fullmatch(data[: data.find(b"\n") + 1]) is not None


def read_ranks(path: Path, config: dict[str, Any] | None = None) -> Tokenizer:
    """Open a rank file of a published vocabulary; takes some seconds for the largest, so save it
    as a folder.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    from headway.tokenizer.folder import finish

    ranks = _parse(path)
    if len(ranks) not in KNOWN:
        raise DataError(
            f"{path} has {len(ranks)} ranks; the word pattern is known only for "
            f"{', '.join(map(str, KNOWN))} ranks."
        )

    known = KNOWN[len(ranks)]
    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = [(spell(left), spell(right)) for left, right in _merges(ranks)]
    backend = Backend(models.BPE(vocabulary, merges))
    if known.normalises:
        backend.normalizer = normalizers.NFC()

    backend.pre_tokenizer = byte_level(known.pattern)
    backend.decoder = decoders.ByteLevel()
    # The class of the folder (Qwen's own) reads the rank file with code that is not needed now.
    unused = ("auto_map", "tokenizer_class")
    usable = {key: value for key, value in (config or {}).items() if key not in unused}
    special = {"additional_special_tokens": list(known.special)}
    return finish(backend, {**special, **known.roles, **usable})


def _parse(path: Path) -> dict[bytes, int]:
    """The ranks of a file: token -> rank, without gaps and with all 256 bytes."""
    from headway.tokenizer.folder import read_bytes

    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue

        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(
                f"{path}:{number}: not a rank line; expected base64 bytes, a space and a number."
            ) from None

    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([b]) not in ranks for b in range(256)
    ):
        raise DataError(
            f"{path}: the ranks have gaps or lack some of the 256 bytes; the file is damaged or "
            "cut short."
        )

    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The two halves of every token of more than one byte, in the order of ranks."""
    return [
        _halves(token, rank, ranks)
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1
    ]


def _halves(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last two parts of a token when its bytes are merged as BPE merges them: always the pair
    of the lowest rank, with tokens of lower rank than its own.
    """
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined_ranks = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        best = min(joined_ranks)
        if best >= rank:
            raise DataError(
                f"token {token!r} cannot be made from tokens of lower rank; the rank file is "
                "damaged."
            )

        index = joined_ranks.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]

    return parts[0], parts[1]

"""Draws a sample of a given size from several sources in given shares: a tokenizer corpus, or a
small copy of a large mixture.

One pass over each source, and no more memory than the sample. Every document draws a number from
(seed, source, place in the source). The documents with the lowest numbers are taken, as many as
fit the source's bytes, so the choice depends on nothing else.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, DataError
from headway.runtime.seed import derive
from headway.text.document import Document, TextSplit
from headway.text.read import read_documents
from headway.text.write import record_file

_UNITS = {
    "": 1,
    "b": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
"""Units of a size in lower case -> bytes: k and kb are 1000, kib is 1024, and so on."""
HIGHEST_DRAW = 1 << 63
"""More than any number that `derive` gives."""


@dataclass(frozen=True)
class SourceShare:
    """One source and its weight; weights are relative to each other."""

    path: str
    weight: float = 1.0

    @staticmethod
    def parse(text: str) -> SourceShare:
        """`PATH@0.7`, or a path alone for weight 1."""
        path, sign, weight = text.rpartition("@")
        # A path may have an @ of its own.
        if not sign or Path(text).exists():
            return SourceShare(text)

        try:
            share = SourceShare(path, float(weight))
        except ValueError:
            raise ConfigError(
                f"input is {text!r}; after @ comes the source's share, as in {path}@0.7."
            ) from None

        if not 0 < share.weight < float("inf"):
            raise ConfigError(f"input is {text!r}; the share after @ must be more than 0.")

        return share


@dataclass(frozen=True)
class SampledSource:
    """What a sample took from one source, and what the source has."""

    path: str
    wanted_bytes: int
    documents: int
    bytes: int
    available_documents: int
    available_bytes: int


def sample(
    shares: Sequence[SourceShare],
    total_bytes: int,
    out: Path,
    *,
    seed: int = 0,
    text_key: str = "text",
    template: str | None = None,
    split: TextSplit = "file",
) -> list[SampledSource]:
    """Write a shuffled sample of `total_bytes` of text to `out`; a source too small for its
    share is an error.
    """
    total_weight = sum(share.weight for share in shares)
    chosen: list[tuple[int, int, Document]] = []
    taken: list[SampledSource] = []
    for number, share in enumerate(shares):
        wanted = int(total_bytes * share.weight / total_weight)
        documents = read_documents(share.path, text_key=text_key, template=template, split=split)
        documents_taken, count, size = choose_documents(
            documents, wanted, derive(seed, "sample", number)
        )
        used = sum(len(document.text.encode()) for _, document in documents_taken)
        taken.append(SampledSource(share.path, wanted, len(documents_taken), used, count, size))
        check_share(taken[-1], total_bytes, share.weight / total_weight, split)
        chosen += [(draw, number, document) for draw, document in documents_taken]

    # The numbers are random, so their order shuffles the sources into each other.
    with record_file(out) as write:
        for _, _, document in sorted(chosen, key=lambda item: item[:2]):
            write({"text": document.text, "source": document.source})

    return taken


def choose_documents(
    documents: Iterable[Document], max_bytes: int, seed: int
) -> tuple[list[tuple[int, Document]], int, int]:
    """A random choice of documents of at most `max_bytes`, with the number each drew; and the
    number and bytes of all documents.
    """
    # heapq gives the smallest entry first; negated numbers make it the highest number.
    heap: list[tuple[int, int, Document]] = []
    used = 0
    count = 0
    size = 0
    limit = HIGHEST_DRAW
    for index, document in enumerate(documents):
        length = len(document.text.encode())
        count += 1
        size += length
        number = derive(seed, index)
        if number >= limit or length > max_bytes:
            continue

        heapq.heappush(heap, (-number, index, document))
        used += length
        while used > max_bytes:
            negated, _, dropped = heapq.heappop(heap)
            used -= len(dropped.text.encode())
            # A document with a higher number than a dropped one stays out too: the choice is by
            # numbers, not by sizes.
            limit = min(limit, -negated)

    return [(-negated, document) for negated, _, document in heap], count, size


def check_share(taken: SampledSource, total_bytes: int, part: float, split: TextSplit) -> None:
    """Refuse a source that is too small for its share, or has no document that fits."""
    if taken.available_bytes < taken.wanted_bytes:
        most = int(taken.available_bytes / part)
        raise DataError(
            f"{taken.path}: has {taken.available_bytes} bytes of text, but its share of "
            f"{total_bytes} is {taken.wanted_bytes}. Request at most {most} bytes, or give it a "
            "smaller share."
        )

    if not taken.documents:
        remedy = " or --split line" if split == "file" else ""
        raise DataError(
            f"{taken.path}: no document fits the {taken.wanted_bytes} bytes of its share; request "
            f"more bytes{remedy}."
        )


def parse_bytes(text: str, name: str) -> int:
    """The bytes of a size such as `100MB`, `4GiB` or `1500000`; `name` is its flag."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name} is {text!r}; write a size such as 500MB, 4GB or 2GiB.")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"{name} is {text!r}; it must be more than 0.")
    return size

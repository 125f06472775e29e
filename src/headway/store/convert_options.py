"""How a token store is converted: what `store/convert.py` takes, and the options of `headway data
convert`.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config.options import option

if TYPE_CHECKING:
    from headway.store.open import StoreKind


def _kind(text: str | None) -> StoreKind | None:
    from headway.store.open import parse_kind

    if not text:
        return None
    return parse_kind(text)


@dataclass(frozen=True)
class ConvertOptions:
    """How to read the source and write the target; each option says to which formats it applies."""

    kind: StoreKind | None = option(
        None,
        "Format of the input if it cannot be detected: internlm, zero2all, zero2all-sft, mds, "
        "megatron.",
        "--from",
        read=_kind,
    )
    rebuild_index: bool = option(
        False,
        "InternLM, zero2all: rebuild the index from the data, ignore index files.",
        "--rebuild-index",
    )
    begin_id: int | None = option(
        None, "zero2all: the token every document begins with; default: taken from the data."
    )
    seq_len: int = option(2048, "To zero2all: tokens of a sample in the index map.", min=1)
    type: str | None = option(
        None,
        "To internlm: one data type (folder) for all; default: the source's types, else en.",
    )
    """A target named X.bin is a single file."""
    compression: str | None = option(None, "To mds: zstd or zstd:LEVEL.")

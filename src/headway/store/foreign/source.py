"""Any token store as a `Source`, so that training, packing and conversion read them all alike."""

from __future__ import annotations

from pathlib import Path

from headway.errors import DataError
from headway.store.foreign.detect import Kind, detect
from headway.store.foreign.internlm import open_internlm
from headway.store.foreign.mds import open_mds
from headway.store.foreign.megatron import open_megatron
from headway.store.foreign.zero2all import open_zero2all
from headway.store.foreign.zero2all_sft import open_zero2all_sft
from headway.store.reader import open_store
from headway.store.source import Source


def open_source(path: Path | str, kind: Kind | None = None, *, rebuild_index: bool = False, begin_id: int | None = None) -> Source:
    """Open a token store of any kind; `kind` is found out if not given.

    `rebuild_index` makes InternLM and zero2all indexes anew instead of trusting the files; `begin_id` is zero2all's begin token.
    """
    where, found = Path(path), kind or detect(path)
    if found == "headway":
        return open_store(where)
    if found == "internlm":
        return open_internlm(where, rebuild_index)
    if found == "zero2all":
        return open_zero2all(where, begin_id, rebuild_index)
    if found == "zero2all-sft":
        return open_zero2all_sft(where)
    if found == "mds":
        return open_mds(where)
    if found == "megatron":
        return open_megatron(where)
    raise DataError(f"{path}: raw data, not tokens. Tokenize it first: headway data tokenize --input {path} --tokenizer DIR --out DIR.")
